"""One side of a measurement, as a process of its own that does work when it is asked to (standard library only).

Two sides are measured in turn, A B A B, though they may live in different environments: each is a process that builds
and compiles its step, says so, and then waits. Every line on its standard input is a number of calls to time; every
line it answers is JSON. Whatever libraries print goes to standard error, so that the answers stay clean.
"""

import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent


def serve(build: Callable[[], tuple[Callable[[], None], dict]]) -> None:
    """Build, answer the facts, then time as many calls as each line asks for; `build` gives (one call, facts)."""
    answers = os.fdopen(os.dup(1), 'w', buffering=1)
    os.dup2(2, 1)
    call, facts = build()
    start = time.perf_counter()
    call()
    facts['first_call_seconds'] = time.perf_counter() - start
    print(json.dumps(facts), file=answers)
    for line in sys.stdin:
        begin = processor_seconds()
        seconds = [timed(call) for _ in range(int(line))]
        answer = {'seconds': seconds, 'memory': peak_memory()}
        answer['processor_seconds'] = (processor_seconds() - begin) / len(seconds)
        print(json.dumps(answer), file=answers)


def timed(call: Callable[[], None]) -> float:
    """Seconds that one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def processor_seconds() -> float:
    """Seconds that all threads of this process have spent on a CPU; other processes hardly change them."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def peak_memory() -> int:
    """The most memory this process has held, in bytes."""
    unit = 1 if sys.platform == 'darwin' else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Arm:
    """The driver's end: starts `script` under `python`, knows its facts, asks for timed calls."""

    def __init__(self, name: str, script: str, arguments: list[str], python: str = sys.executable, **environment: str):
        self.name, self.processor_seconds, self.memory = name, [], 0
        environment = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONUNBUFFERED': '1', **environment}
        command = [python, str(HERE / script), *arguments]
        pipe, self.complaints = subprocess.PIPE, tempfile.TemporaryFile('w+')
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self.complaints, text=True, env=environment
        )
        self.facts = None

    def ready(self) -> dict:
        """Wait until the side has compiled; its facts."""
        self.facts = self.facts or self._answer()
        return self.facts

    def ask(self, calls: int) -> list[float]:
        """Time `calls` calls now; their seconds. CPU seconds per call are kept."""
        self.ready()
        self.process.stdin.write(f'{calls}\n')
        self.process.stdin.flush()
        answer = self._answer()
        self.processor_seconds.append(answer['processor_seconds'])
        self.memory = answer['memory']
        return answer['seconds']

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            self.complaints.seek(0)
            said = self.complaints.read().strip()[-2000:]
            self.close()
            raise RuntimeError(f'the side {self.name} of a benchmark ended: {said}')
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()
        self.complaints.close()
