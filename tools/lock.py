"""`make lock`: resolve the locks for Python 3.11 to 3.13 on every platform, and say which committed runs they outdate."""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

from packaging.markers import Marker

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / 'containers' / 'locks'
QUIET = ('--quiet', '--no-header', '--no-emit-index-url', '--no-emit-find-links')
EXTRAS = {'train': ('train', 'editable'), 'dev': ('train', 'editable', 'eval', 'cluster', 'dev')}


def compile_lock(name, upgrade):
    "Run uv over pyproject.toml; `dev` keeps to the versions of `train`."
    uv = Path(sys.executable).parent / 'uv'
    command = [
        uv,
        'pip',
        'compile',
        *QUIET,
        '--universal',
        '--generate-hashes',
        '--python-version',
        '3.11',
        'pyproject.toml',
    ]
    command += [x for extra in EXTRAS[name] for x in ('--extra', extra)]
    command += ['-c', 'containers/locks/train.lock'] if name == 'dev' else []
    command += ['--upgrade'] if upgrade else []
    done = subprocess.run([*command, '-o', f'containers/locks/{name}.lock'], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)


def pins(text):
    "The lines of a lock as (name, version, marker or None)."
    rows = re.findall(r'^([A-Za-z0-9][\w.-]*)==([^\s;\\]+)(?: ; ([^\\\n]+?))?(?= \\|$)', text, re.MULTILINE)
    return [(re.sub(r'[-_.]+', '-', name).lower(), version, marker or None) for name, version, marker in rows]


def versions(rows, python):
    "Name to version of the pins that hold on CPython `python`, on Linux."
    short = '.'.join(python.split('.')[:2])
    where = {
        'python_version': short,
        'python_full_version': python,
        'sys_platform': 'linux',
        'platform_system': 'Linux',
    }
    where |= {'implementation_name': 'cpython', 'platform_python_implementation': 'CPython', 'os_name': 'posix'}
    return {name: version for name, version, marker in rows if not marker or Marker(marker).evaluate(where)}


def outdated(artifacts, rows):
    "Committed runs whose identity names a version that the lock no longer gives, as (run, package, recorded, now)."
    found = []
    for path in sorted(artifacts.rglob('run.json')):
        identity = json.loads(path.read_text(encoding='utf-8')).get('identity', {})
        now = versions(rows, identity.get('python', '3.11.0'))
        for name, recorded in sorted(identity.get('versions', {}).items()):
            if recorded != 'absent' and now.get(name) != recorded:
                found.append((path.parent.relative_to(artifacts).as_posix(), name, recorded, now.get(name, 'absent')))
    return found


def changes(before, after):
    "Lines that say what moved between two lists of pins."
    gone, new = sorted(set(before) - set(after), key=str), sorted(set(after) - set(before), key=str)
    return [f'- {n}=={v}' for n, v, _ in gone] + [f'+ {n}=={v}' for n, v, _ in new]


def main():
    "Renew both locks, print what moved and which run identities change with it."
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('--upgrade', action='store_true', help='take the newest of everything, not only what has to move')
    upgrade = p.parse_args().upgrade
    for name in EXTRAS:
        path = LOCKS / f'{name}.lock'
        before = pins(path.read_text(encoding='utf-8')) if path.exists() else []
        compile_lock(name, upgrade)
        rows = pins(path.read_text(encoding='utf-8'))
        print('\n'.join([f'{name}.lock: {len(rows)} pins', *changes(before, rows)]))
        if name == 'train':
            runs = outdated(ROOT / 'artifacts', rows)
    print(f'run identities that this changes: {len(runs) or "none"}')
    print('\n'.join(f'  {run}: {package} {recorded} -> {now}' for run, package, recorded, now in runs), end='')


if __name__ == '__main__':
    main()
