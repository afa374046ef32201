"""The peer's environment: made from its hashed lock, in the cache, with a Python that the peer can use."""

import shutil
import subprocess
import sys
from pathlib import Path

from ladderbook import settings
from ladderbook.errors import ResourceError
from ladderbook.files import sha256_file

LOCK = 'containers/locks/peer-marin.lock'
PYTHON = '3.12'


def environment(base: str | None = None) -> Path:
    """The Python of the peer's environment; made with Python `base` when it is missing or the lock has changed."""
    here = settings.load()
    lock = settings.bundled(LOCK)
    place = here.paths.cache / 'peer-marin'
    python, stamp = place / 'bin' / 'python', place / 'lock.sha256'
    if python.exists() and stamp.exists() and stamp.read_text().strip() == sha256_file(lock):
        return python
    print(f'making the environment of the peer (about 1.6 GB) in {place}', file=sys.stderr)
    uv = [sys.executable, '-m', 'uv']
    subprocess.run([*uv, 'venv', '--quiet', '--clear', '--python', base or interpreter(), str(place)], check=True)
    install = ['pip', 'install', '--quiet', '--python', str(python), '--require-hashes', '-r', str(lock)]
    subprocess.run([*uv, *install], check=True)
    stamp.write_text(sha256_file(lock) + '\n')
    return python


def interpreter() -> str:
    """A Python 3.12: on the path, or among pyenv's."""
    found = [shutil.which(f'python{PYTHON}'), *sorted(Path.home().glob(f'.pyenv/versions/{PYTHON}.*/bin/python'))]
    for candidate in found:
        if candidate and runs(str(candidate)):
            return str(candidate)
    raise ResourceError(f'the peer needs Python {PYTHON} and none was found; name one with --peer-python')


def runs(python: str) -> bool:
    """Whether `python` is the version that the peer needs (pyenv's shims may be there and not run)."""
    check = f'import sys; sys.exit("%d.%d" % sys.version_info[:2] != "{PYTHON}")'
    return subprocess.run([python, '-c', check], capture_output=True).returncode == 0
