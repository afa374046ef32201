"""`make replay` from an empty machine, measured from outside: a fresh clone, empty caches, then a second seed."""

import os
import re
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import psutil
from ladderbook import machine, settings


class Watch(threading.Thread):
    """Samples the memory of a process and all below it: the most they held together (resident, shared pages once
    per process) and the most that one of them held, in bytes."""

    def __init__(self, pid: int):
        super().__init__(daemon=True)
        self.root, self.together, self.largest, self.over = psutil.Process(pid), 0, 0, threading.Event()

    def run(self):
        while not self.over.wait(0.1):
            held = []
            try:
                for process in [self.root, *self.root.children(recursive=True)]:
                    held.append(process.memory_info().rss)
            except psutil.Error:
                continue
            self.together, self.largest = max(self.together, sum(held)), max(self.largest, *held)


def received() -> int:
    """Bytes that came in over the network since the machine started, this machine's talk to itself left out."""
    return sum(v.bytes_recv for k, v in psutil.net_io_counters(pernic=True).items() if k != 'lo')


def named(log: str) -> int:
    """Bytes that pip's log says it downloaded: every `Downloading ... (12.3 MB)` line."""
    unit = {'bytes': 1, 'kB': 1e3, 'MB': 1e6, 'GB': 1e9}
    found = re.findall(r'Downloading \S+.*\(([\d.]+) (bytes|kB|MB|GB)\)', log)
    return int(sum(float(n) * unit[u] for n, u in found))


def run(command: list[str], folder: Path, log: Path, environment: dict) -> dict:
    """Run `command` to its end; seconds, memory, bytes received, exit code."""
    before, start = received(), time.monotonic()
    with open(log, 'w') as out:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT)
        watch = Watch(process.pid)
        watch.start()
        code = process.wait()
        watch.over.set()
        watch.join()
    facts = {'seconds': round(time.monotonic() - start, 1), 'exit_code': code, 'received_bytes': received() - before}
    facts |= {'pip_bytes': named(log.read_text()), 'peak_memory': watch.together, 'largest_process': watch.largest}
    if code:
        raise RuntimeError(f'{" ".join(command)} ended with {code}: {log.read_text()[-2000:]}')
    return facts


def measure(arguments: tuple[str, ...] = ()) -> dict:
    """A first and a second `make replay` in a clone of what is committed, with empty caches of every kind."""
    with tempfile.TemporaryDirectory(prefix='replay-') as folder:
        clone, log = Path(folder) / 'clone', Path(folder) / 'log'
        subprocess.run(['git', 'clone', '--quiet', str(settings.load().home), str(clone)], check=True)
        caches = {k: str(Path(folder) / k.lower()) for k in ('PIP_CACHE_DIR', 'UV_CACHE_DIR', 'XDG_CACHE_HOME')}
        kept = {k: v for k, v in os.environ.items() if not k.startswith(('VIRTUAL_ENV', 'LADDERBOOK_', 'PYTHONPATH'))}
        first = run(['make', 'replay', *arguments], clone, log, kept | caches)
        second = run(['make', 'replay', 'SEED=1', *arguments], clone, log, kept | caches)
        return {'first': first, 'second_seed': second, 'disk_bytes': size(clone), 'threads': len(machine.cpu_set())}


def size(folder: Path) -> int:
    """Bytes of all files below `folder`."""
    return sum(p.lstat().st_size for p in folder.rglob('*') if p.is_file() and not p.is_symlink())
