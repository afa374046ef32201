"""Where the time of a training step goes: the profiler's seconds per compiled operation, added up by our modules.

XLA's text names each operation and the source line it came from (a backward operation carries the line of its forward
one); the profiler names the same operations with their seconds. Containers (loops, calls) are left out, and of an
operation that ran inside another only the inner one keeps that time.
"""

import argparse
import json
import re
import tempfile
from collections import Counter
from pathlib import Path

CONTAINERS = ('while', 'call', 'conditional')


def frames(text: str) -> dict[int, str]:
    """Of each stack frame in the compiled text, the innermost file of ladderbook (or optax) as a module name."""
    table = {name: dict(re.findall(r'^(\d+) (.*)$', body, re.M)) for name, body in sections(text).items()}
    files = {k: v.strip('"') for k, v in table['FileNames'].items()}
    place = {k: files[re.search(r'file_name_id=(\d+)', v)[1]] for k, v in table['FileLocations'].items()}
    frame = {k: re.search(r'file_location_id=(\d+)', v)[1] for k, v in table['StackFrames'].items()}
    above = {k: re.search(r'parent_frame_id=(\d+)', v) for k, v in table['StackFrames'].items()}
    shift = 1 if above.get('1') and above['1'][1] == '1' else 0
    known = {}
    for k in frame:
        at, seen = k, 0
        while at in frame and not module(place[frame[at]]) and seen < 99:
            at, seen = str(int(above[at][1]) - shift) if above[at] else '0', seen + 1
        known[int(k)] = module(place[frame[at]]) if at in frame else 'other'
    return known


def sections(text: str) -> dict[str, str]:
    """The tables of file names, locations and frames at the head of the compiled text."""
    names = ('FileNames', 'FunctionNames', 'FileLocations', 'StackFrames')
    return {name: m[1] for name in names if (m := re.search(rf'^{name}\n((?:\d+ .*\n)+)', text, re.M))}


def module(path: str) -> str:
    """`model/experts.py` of ladderbook as model.experts, optax as optax, anything else as nothing."""
    parts = Path(path).with_suffix('').parts
    if 'ladderbook' in parts:
        return '.'.join(parts[len(parts) - parts[::-1].index('ladderbook') :])
    return 'optax' if 'optax' in parts else ''


def operations(text: str) -> dict[str, str]:
    """Each operation of the compiled text and the module it came from; containers excepted."""
    known, found = frames(text), {}
    for name, kind, rest in re.findall(r'^\s+(?:ROOT )?%([\w.\-]+) = \S+(?: \S+\})? ([\w\-]+)\((.*)$', text, re.M):
        if kind in CONTAINERS:
            continue
        frame = re.search(r'stack_frame_id=(\d+)', rest)
        found[name] = known.get(int(frame[1]), 'other') if frame else 'compiler'
    return found


def seconds(trace: Path, operation: dict[str, str]) -> Counter:
    """Seconds per module in the profile under `trace`, nested time counted once."""
    from jax.profiler import ProfileData

    total = Counter()
    for plane in ProfileData.from_file(str(next(trace.rglob('*.xplane.pb')))).planes:
        for line in plane.lines:
            open_until = []
            events = [(e.start_ns, -e.duration_ns, e.name) for e in line.events if e.name in operation]
            for start, minus, name in sorted(events):
                while open_until and open_until[-1][0] <= start:
                    open_until.pop()
                if open_until:
                    total[open_until[-1][1]] += minus / 1e9
                total[operation[name]] -= minus / 1e9
                open_until.append((start - minus, operation[name]))
    return total


def main():
    """Profile a few steps of a rung; prints JSON with each module's share of the operations' time."""
    import jax
    import ours
    from ladderbook.train import step

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('shape')
    parser.add_argument('--steps', type=int, default=5)
    given = parser.parse_args()
    p = ours.program(argparse.Namespace(shape=given.shape, experts='capacity', adam=False))
    compiled, rows = step.compile_step(p), jax.tree.map(jax.numpy.asarray, ours.batch(p.recipe))
    state, _ = compiled(step.initial_state(p, 0), rows)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(given.steps):
                state, _ = jax.block_until_ready(compiled(state, rows))
        total = seconds(Path(folder), operations(compiled.as_text()))
    whole = sum(total.values())
    shares = {k: round(v / whole, 4) for k, v in total.most_common()}
    print(json.dumps({'shares': shares, 'seconds_per_step': float(f'{whole / given.steps:.4g}')}))


if __name__ == '__main__':
    main()
