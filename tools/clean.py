"""What ladderbook made on this machine and could make again: listed with its size; removed only with --yes.

Runs are results, not rubbish: they are listed one by one, and stay unless --runs names them too.
"""

import argparse
import shutil

from environment import ROOT, setting

MADE = ('build', 'dist', '_proc', '_docs', '.pytest_cache', '.ruff_cache', '.hypothesis', 'package/ladderbook.egg-info')


def folders():
    "The folders that exist of caches, environments and build products."
    named = [('paths', 'cache'), ('environments', 'train'), ('environments', 'serve')]
    found = [ROOT / setting(*key) for key in named] + [ROOT / name for name in MADE]
    found += sorted(p for top in ('package', 'tests', 'tools') for p in (ROOT / top).rglob('__pycache__'))
    return [p for p in found if p.is_dir() and inside(p)]


def runs():
    "The folders of the replayed runs."
    top = ROOT / setting('paths', 'runs')
    return [p for p in sorted(top.iterdir()) if p.is_dir() and inside(p)] if top.is_dir() else []


def inside(path):
    "True for a folder of the clone; what the settings put elsewhere is left to its owner."
    return ROOT in path.resolve().parents


def size(folder):
    "Bytes of the files under `folder`; a link counts for itself."
    return sum(p.lstat().st_size for p in folder.rglob('*') if p.is_symlink() or not p.is_dir())


def main():
    "List; remove when told to."
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('--yes', action='store_true')
    p.add_argument('--runs', action='store_true', help='the replayed runs, too')
    a = p.parse_args()
    sizes = {folder: size(folder) for folder in folders() + (runs() if a.runs else [])}
    kept = {} if a.runs else {folder: size(folder) for folder in runs()}
    for folder, n in (sizes | kept).items():
        print(
            f'{n / 1e6:10.1f} MB  {folder.relative_to(ROOT)}{"  (kept; RUNS=1 removes it)" if folder in kept else ""}'
        )
    if kept:
        print(f'{sum(kept.values()) / 1e6:10.1f} MB  of runs, kept: RUNS=1 with YES=1 removes them')
    note = 'removed' if a.yes else 'in all; nothing was removed: make clean YES=1 (RUNS=1 for the replayed runs, too)'
    for folder in sizes if a.yes else ():
        shutil.rmtree(folder)
    print(f'{sum(sizes.values()) / 1e6:10.1f} MB  {note}')


if __name__ == '__main__':
    main()
