"""What ladderbook made on this machine and could make again: listed with its size; removed only with --yes.

Runs are results, not rubbish: they stay unless --runs names them too.
"""

import argparse
import shutil

from environment import ROOT, setting

MADE = ('build', 'dist', '_proc', '_docs', '.pytest_cache', '.ruff_cache', '.hypothesis', 'package/ladderbook.egg-info')


def folders(runs):
    "The folders that exist: caches, environments, build products and, when asked for, runs."
    named = [('paths', 'cache'), ('environments', 'train'), ('environments', 'serve')]
    named += [('paths', 'runs')] if runs else []
    found = [ROOT / setting(*key) for key in named] + [ROOT / name for name in MADE]
    found += sorted(p for top in ('package', 'tests', 'tools') for p in (ROOT / top).rglob('__pycache__'))
    return [p for p in found if p.is_dir() and inside(p)]


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
    sizes = {folder: size(folder) for folder in folders(a.runs)}
    for folder, n in sizes.items():
        print(f'{n / 1e6:10.1f} MB  {folder.relative_to(ROOT)}')
    note = 'removed' if a.yes else 'in all; nothing was removed: make clean YES=1 (RUNS=1 for the replayed runs, too)'
    for folder in sizes if a.yes else ():
        shutil.rmtree(folder)
    print(f'{sum(sizes.values()) / 1e6:10.1f} MB  {note}')


if __name__ == '__main__':
    main()
