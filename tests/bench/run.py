"""Measure speed and write it down: `python tests/bench/run.py [names] [--rounds N] [--peer-python PATH]`.

Ratios against a peer or a plainer version of the same thing, both sides in turn on the same CPUs, median and spread
of the rounds; nothing here passes or fails. Each benchmark writes one file under artifacts/benchmarks/.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import decontam
import measure
import near
import peer
import replay
from arm import HERE, Arm
from ladderbook import settings
from ladderbook.files import read_json

RUNGS = ['desk-64', 'desk-128', 'desk-192', 'desk-64:384/8']  # the last: the recipe's own count of experts
FORCED = '--xla_force_host_platform_device_count=8'
GIGA = 1e9


def sides(question: str, name: str, arms: list[Arm], given, pairs: dict, calls: int = 1, **more) -> Path:
    """Measure `arms` in turn and write record `name`; `pairs`: title to (fast side, slow side, goal or None)."""
    try:
        seconds = measure.interleave(arms, given.rounds, calls)
        facts = {side.name: measure.facts_of(side, seconds[side.name]) for side in arms}
    finally:
        measure.close(arms)
    ratios = {k: measure.ratio(seconds[a], seconds[b], goal) for k, (a, b, goal) in pairs.items()}
    return measure.write(name, question, given.rounds, sides=facts, ratios=ratios, calls=calls, **more)


def step(given) -> Path:
    """Capacity buffers with batched matmul against `jax.lax.ragged_dot` in the same model."""
    arms = [Arm(f'{r}, {e}', 'ours.py', [r, '--experts', e]) for r in given.rungs for e in ('capacity', 'ragged')]
    pairs = {r: (f'{r}, capacity', f'{r}, ragged', 8.0) for r in given.rungs}
    return sides('How much faster is a training step than with ragged_dot?', 'step', arms, given, pairs)


def marin(given) -> Path:
    """Our model against Marin's own package, on one device and on eight forced ones."""
    python = str(peer.environment(given.peer_python))
    forced = ['--devices', '8', '--implementation']
    arms = [
        Arm('ours', 'ours.py', ['marin', '--adam']),
        Arm('ours, dropless', 'ours.py', ['marin', '--adam', '--experts', 'dropless']),
        Arm('peer, one device', 'peer_marin.py', [], python),
        Arm(
            'peer, 8 devices, fixed all-to-all',
            'peer_marin.py',
            [*forced, 'fixed_all_to_all'],
            python,
            XLA_FLAGS=FORCED,
        ),
        Arm('peer, 8 devices, ring', 'peer_marin.py', [*forced, 'ring'], python, XLA_FLAGS=FORCED),
    ]
    pairs = {
        'one device': ('ours', 'peer, one device', 6.0),
        'one device, both dropless': ('ours, dropless', 'peer, one device', None),
        '8 forced devices, fixed all-to-all': ('ours', 'peer, 8 devices, fixed all-to-all', 1.0),
        '8 forced devices, ring': ('ours', 'peer, 8 devices, ring', None),
    }
    notes = [
        "The peer's one-device path drops nothing; ours has capacity 1.25, its 8-device path capacity 1.0.",
        'Ours also projects into a latent space, balances by quantiles and returns telemetry; the peer does none of it.',
        'No short convolutions in ours and norms of rank 128, as in the peer. Adam of optax on both sides, float32.',
    ]
    return sides('Is our step faster than that of the published package?', 'marin', arms, given, pairs, notes=notes)


def matmul(given) -> Path:
    """Model FLOPs of a step per second against the best that matrix products reach on this machine."""
    arms = [Arm(f'matmul {n}', 'matmul.py', [str(n)]) for n in (1024, 2048)]
    arms += [Arm(r, 'ours.py', [r]) for r in given.rungs]
    path = sides("How much of the machine's arithmetic does a step use?", 'matmul', arms, given, {}, calls=3)
    record = read_json(path, measure.SCHEMA)
    best = max(record['sides'][f'matmul {n}']['flops_per_second']['max'] for n in (1024, 2048))
    share = {r: {k: round(v / best, 4) for k, v in record['sides'][r]['flops_per_second'].items()} for r in given.rungs}
    for r in given.rungs:
        share[r]['n'] = given.rounds
    more = {k: v for k, v in record.items() if k not in ('schema', 'version')}
    more |= {'peak_flops_per_second': best, 'share_of_peak': share}
    return measure.write(more.pop('name'), more.pop('question'), more.pop('rounds'), **more)


def profile(given) -> Path:
    """Where the time of a step goes, by the module that asked for it."""
    found = {}
    for r in given.rungs:
        command = [sys.executable, str(HERE / 'hotspots.py'), r, '--steps', str(given.rounds)]
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, env={**os.environ, 'JAX_PLATFORMS': 'cpu'}
        )
        found[r] = json.loads(done.stdout.splitlines()[-1])
    return measure.write('profile', 'Where does the time of a training step go?', given.rounds, rungs=found)


def loader(given) -> Path:
    """Rows of tokens per second against grain item by item and against a bare gather."""
    arms = [Arm(name, 'loader.py', [name]) for name in ('rows', 'grain', 'numpy')]
    pairs = {'grain, item by item': ('rows', 'grain', None), 'numpy gather alone': ('rows', 'numpy', None)}
    return sides('How fast do rows reach the step?', 'loader', arms, given, pairs)


def serving(given) -> Path:
    """An export through vLLM, transformers, and transformers' own model of equal sizes."""
    python = str(settings.load().environments.serve / 'bin' / 'python')
    arms = [Arm(n, 'served.py', [n, given.export], python) for n in ('vllm', 'transformers', 'forward', 'qwen3-moe')]
    pairs = {'generate of transformers': ('vllm', 'transformers', 2.0), 'Qwen3-MoE': ('forward', 'qwen3-moe', 1.0)}
    notes = [
        'vllm and transformers: greedy, 8 prompts of 32 tokens, 64 new tokens each, float32; vllm with torch.compile and '
        'without its statistics, transformers as `generate` comes. The time to compile, once, is not counted.',
        'One thread on every side: on a busy machine two wait for each other, and measure the wait.',
        'forward and qwen3-moe: 8 rows of a whole context, no cache, in transformers; equal width, layers, heads, '
        'experts, experts per token and inner width. Ours has convolutions, gated norms, shared experts and a latent '
        'space beside; the other multiplies experts of twice the input width.',
    ]
    return sides('How fast is an export served?', 'serving', arms, given, pairs, notes=notes)


def whole(given) -> Path:
    """`make replay` from an empty machine, and again with another seed."""
    limits = {'first_seconds': 600, 'second_seconds': 180, 'memory_bytes': 3e9, 'download_bytes': 500e6}
    arguments = tuple(f'RUNG={given.rung}' for _ in [0] if given.rung)
    result = replay.measure(arguments)
    question = 'How long is it from an empty machine to a trained rung?'
    return measure.write('replay', question, 1, **result, limits=limits, rung=given.rung or 'default')


BENCHMARKS = {f.__name__: f for f in (matmul, step, marin, profile, loader, serving)} | {'replay': whole}
BENCHMARKS |= {m.__name__: lambda given, m=m: m.main(given.rounds) for m in (near, decontam)}


def show(path: Path) -> None:
    """The record in a few lines."""
    record = read_json(path, measure.SCHEMA)
    print(f'{record["name"]}: {record["question"]} ({path})')
    for name, side in record.get('sides', {}).items():
        rate = side.get('tokens_per_second') or {k: v / GIGA for k, v in side['flops_per_second'].items()}
        unit = 'tokens/s' if 'tokens_per_second' in side else 'GFLOP/s'
        spent = side['processor_seconds']['median']
        print(
            f'  {name:36} {rate["median"]:12,.0f} {unit} ({rate["min"]:,.0f} to {rate["max"]:,.0f}), CPU {spent:.3g} s'
        )
    for name, r in record.get('ratios', {}).items():
        goal = f', goal {r["goal"]:g}' if r['goal'] else ''
        print(f'  against {name:36} {r["median"]:.2f}x ({r["min"]:.2f} to {r["max"]:.2f}){goal}')
    for key in ('share_of_peak', 'rungs', 'first', 'second_seed'):
        for name, value in (record.get(key) or {}).items():
            print(f'  {key} {name}: {value}')


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('names', nargs='*', help=f'which of {", ".join(BENCHMARKS)}; none: all')
    parser.add_argument('--rounds', type=int, default=measure.ROUNDS, help='rounds of each side, %(default)s')
    parser.add_argument('--peer-python', help="a Python 3.12 to make the peer's environment with")
    parser.add_argument('--rungs', nargs='+', default=RUNGS, help='rungs whose step is measured, %(default)s')
    parser.add_argument('--export', help='the export that is served; serving needs it')
    parser.add_argument('--rung', help='the rung that replay trains; none: the default of settings.ini')
    given = parser.parse_args(argv)
    if strange := [n for n in given.names if n not in BENCHMARKS]:
        parser.error(f'no benchmark is called {strange[0]!r}; known: {", ".join(BENCHMARKS)}')
    names = given.names or [n for n in BENCHMARKS if n != 'serving' or given.export]
    if 'serving' in names and not given.export:
        parser.error('serving needs --export FOLDER')
    print(f'CPUs {measure.pin()}')
    for name in names:
        show(BENCHMARKS[name](given))


if __name__ == '__main__':
    main()
