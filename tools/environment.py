"""The environments: made once per lock, checked by hash, brought in step when the lock changes.

Runs with any Python >= 3.11 and its standard library alone, because it makes the environment that has the rest.
"""

import argparse
import configparser
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / 'containers' / 'locks'
KEPT = {'pip', 'setuptools', 'ladderbook', 'vllm'}
FILES = {'train': 'train.lock', 'dev': 'dev.lock', 'serve': 'serve-cpu.txt'}
DISK = {'train': 2_000_000_000, 'dev': 2_000_000_000, 'serve': 5_000_000_000}
STATED = {'train': 'about a minute', 'dev': 'about a minute', 'serve': 'about three minutes, 0.5 GB of downloads'}
METADATA = ROOT / 'containers' / 'serve' / 'vllm-metadata'


def setting(section, key):
    "One value of settings.ini; the environment overrides it, as ladderbook.settings does."
    text = os.environ.get(f'LADDERBOOK_{section}_{key}'.upper())
    if text is None:
        parser = configparser.ConfigParser(interpolation=None)
        parser.read(ROOT / 'settings.ini', encoding='utf-8')
        text = parser[section][key]
    return text


def sha256(*paths):
    "sha256 over the bytes of these files, one after the other."
    h = hashlib.sha256()
    for p in paths:
        h.update(p.read_bytes())
    return h.hexdigest()


def pinned(lock):
    "Names of the distributions that a lock file pins, normalised."
    names = re.findall(r'^([A-Za-z0-9][\w.-]*)==', lock.read_text(encoding='utf-8'), re.MULTILINE)
    return {re.sub(r'[-_.]+', '-', n).lower() for n in names}


def wanted(name):
    "What the stamp must say for the environment to be ready for lock `name`."
    return {
        'lock': name,
        'sha256': sha256(LOCKS / FILES[name]),
        'project': sha256(ROOT / 'pyproject.toml', ROOT / 'setup.py', METADATA / 'pyproject.toml'),
        'root': str(ROOT),
    }


def stamp_of(folder):
    "What the environment was last made from; nothing when it was never finished."
    try:
        return json.loads((folder / 'ladderbook.json').read_text(encoding='utf-8'))
    except (OSError, ValueError):
        return {}


def rather(folder, name):
    "The lock to use when `name` is asked for: an environment that holds `dev` keeps it, `train` is a part of it."
    return 'dev' if stamp_of(folder).get('lock') == 'dev' else name


def ready(folder, name):
    "True when the environment is in step with lock `name` and its Python still runs."
    return stamp_of(folder) == wanted(name) and works(folder)


def works(folder):
    "True when the environment's Python starts and is one of the versions that the locks are made for."
    code = 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))'
    try:
        return subprocess.run([folder / 'bin' / 'python', '-c', code], capture_output=True).returncode == 0
    except OSError:
        return False


def pip(folder, *args, offline=None):
    "Run the environment's pip; offline it sees neither an index nor anybody's pip settings."
    env = dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK='1', PIP_NO_INPUT='1')
    if offline:
        env = {k: v for k, v in env.items() if not k.startswith('PIP_')} | {'PIP_CONFIG_FILE': os.devnull}
    command = [folder / 'bin' / 'python', '-m', 'pip', *args]
    done = subprocess.run([str(c) for c in command], env=env, capture_output=True, text=True)
    if done.returncode:
        lines = [x for x in (done.stdout + done.stderr).splitlines() if x.strip() and 'is ignored: it is' not in x]
        sys.exit('\n'.join(['pip failed:', *lines[-12:]]))
    return done.stdout


def extras(folder, lock):
    "Distributions in the environment that the lock does not name."
    site = next((folder / 'lib').glob('python3.*/site-packages'))
    names = {d.metadata['Name'] for d in importlib.metadata.distributions(path=[str(site)])}
    return sorted(n for n in names if re.sub(r'[-_.]+', '-', n).lower() not in pinned(lock) | KEPT)


def make(folder, name, offline):
    "Install the lock into `folder` with hash checking, drop what it does not name, add the package itself."
    lock = LOCKS / FILES[name]
    source = ['--no-index', '--find-links', str(Path(offline) / 'wheels')] if offline else []
    if not works(folder):
        venv.EnvBuilder(clear=True, with_pip=True, symlinks=True).create(folder)
    (folder / 'ladderbook.json').write_text(json.dumps({'lock': name}), encoding='utf-8')
    pip(folder, 'install', '--no-deps', '--require-hashes', *source, '-r', lock, offline=offline)
    if gone := extras(folder, lock):
        pip(folder, 'uninstall', '--yes', *gone)
    if name == 'serve':
        pip(folder, 'install', '--no-deps', '--no-build-isolation', METADATA)
    pip(folder, 'install', '--no-deps', '--no-build-isolation', *source, '-e', ROOT, offline=offline)
    (folder / 'ladderbook.json').write_text(json.dumps(wanted(name)), encoding='utf-8')


def not_served():
    "Why this machine cannot have the serving environment, or nothing."
    if (platform.system(), platform.machine(), *sys.version_info[:2]) == ('Linux', 'x86_64', 3, 11):
        return ''
    return (
        f'the serving lock is for Linux x86_64 and Python 3.11, this is {here()}; '
        'use PYTHON=/path/to/python3.11, or on a GPU machine `pip install ladderbook[serve]`, which takes stock vLLM'
    )


def here():
    "Python version and platform in the words that decide which wheels fit."
    return f'python{sys.version_info.major}.{sys.version_info.minor} {platform.system()} {platform.machine()}'.lower()


def main():
    "Bring the environment in step with a lock, one process at a time."
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('lock', choices=[*FILES, 'path'], help='which lock, or print the folder and stop')
    p.add_argument('--if-it-fits', action='store_true', help='nothing is wrong where the environment cannot be')
    p.add_argument('--offline', help='a folder made by `make fetch`: no index is asked')
    a = p.parse_args()
    folder = ROOT / setting('environments', 'serve' if a.lock == 'serve' else 'train')
    if a.lock == 'serve' and (why := not_served()):
        print(why, file=sys.stderr)
        sys.exit(0 if a.if_it_fits else 5)
    if a.lock == 'path':
        return print(setting('environments', 'train'))
    cache = ROOT / setting('paths', 'cache')
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / 'environment.lock', 'w') as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        name = rather(folder, a.lock)
        if ready(folder, name):
            return None
        if not folder.exists() and (free := shutil.disk_usage(ROOT).free) < (need := DISK[name]):
            print(f'the environment needs {need / 1e9:.1f} GB of disk; {free / 1e9:.1f} GB are free', file=sys.stderr)
            sys.exit(5)
        print(f'Python {platform.python_version()} found at {sys.executable}', flush=True)
        if a.offline:
            from offline import verify

            verify(a.offline)
        print(f'making {folder} from containers/locks/{FILES[name]} ({STATED[name]}) ...', flush=True)
        start = time.monotonic()
        make(folder, name, a.offline)
        print(f'{folder} is ready, {time.monotonic() - start:.0f} s', flush=True)


if __name__ == '__main__':
    main()
