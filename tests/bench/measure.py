"""Two sides in turn, the ratio round by round, and the record that is left of it."""

import os
import platform
import statistics
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import arm
from ladderbook import files, machine, settings

SCHEMA = 'ladderbook.benchmark'
ROUNDS = 7
ENOUGH = 5


def folder() -> Path:
    """Where the records of the benchmarks lie."""
    return settings.load().paths.artifacts / 'benchmarks'


def pin() -> list[int]:
    """Keep this process and all that it starts to the settings' number of CPUs; the CPUs."""
    cpus = machine.cpu_set()[: settings.load().replay.threads]
    if hasattr(os, 'sched_setaffinity'):
        os.sched_setaffinity(0, cpus)
    return cpus


def versions(*names: str) -> dict[str, str]:
    """Versions of Python and of the packages that are there."""
    found = {'python': platform.python_version()}
    for name in names or ('jax', 'jaxlib', 'flax', 'optax', 'grain', 'numpy'):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = 'not installed'
    return found


def spread(values) -> dict:
    """Median, least and greatest of `values`, to five digits."""
    values = list(values)
    five = {'median': statistics.median(values), 'min': min(values), 'max': max(values)}
    return {k: float(f'{v:.5g}') for k, v in five.items()} | {'n': len(values)}


def interleave(arms: list[arm.Arm], rounds: int = ROUNDS, calls: int = 1) -> dict[str, list[float]]:
    """Seconds per call of each side and round, the sides taking turns: A B A B, forwards and backwards alternately."""
    for side in arms:
        side.ready()
        side.ask(1)
        side.processor_seconds.clear()
    seconds = {side.name: [] for side in arms}
    for i in range(rounds):
        for side in arms if i % 2 == 0 else arms[::-1]:
            seconds[side.name].append(statistics.median(side.ask(calls)))
    return seconds


def ratio(fast: list[float], slow: list[float], goal: float | None = None) -> dict:
    """How many times faster: the ratio of each round's pair, then median and spread."""
    return spread(b / a for a, b in zip(fast, slow, strict=True)) | {'goal': goal}


def facts_of(side: arm.Arm, seconds: list[float]) -> dict:
    """What the record says of one side: its own facts, seconds per call, work per second."""
    facts = dict(side.ready())
    facts = {k: float(f'{v:.5g}') if isinstance(v, float) else v for k, v in facts.items()}
    facts |= {'seconds': spread(seconds), 'peak_memory': side.memory}
    facts['processor_seconds'] = spread(side.processor_seconds)
    for work in ('tokens', 'flops'):
        if work in facts:
            facts[f'{work}_per_second'] = spread(facts[work] / s for s in seconds)
    return facts


def close(arms: list[arm.Arm]) -> None:
    """End all sides."""
    for side in arms:
        side.close()


def write(name: str, question: str, rounds: int, **result) -> Path:
    """Write the record of benchmark `name`; `rough` says that it has too few rounds to be quoted."""
    path = folder() / f'{name}.json'
    common = {
        'name': name,
        'question': question,
        'machine': machine.this_machine().line(),
        'cpus': machine.cpu_set(),
        'date': time.strftime('%Y-%m-%d', time.gmtime()),
        'load': [round(x, 2) for x in os.getloadavg()],
        'rounds': rounds,
        'rough': rounds < ENOUGH,
        'versions': versions(),
    }
    files.write_json(path, common | result, SCHEMA)
    return path
