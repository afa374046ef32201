"""What ladderbook made on this machine and could make again: listed with its size; removed only with --yes."""

import argparse
import shutil
from pathlib import Path

from environment import ROOT, setting

MADE = ('build', 'dist', '_proc', '_docs', '.pytest_cache', '.ruff_cache', '.hypothesis', 'package/ladderbook.egg-info')


def folders():
    "The folders that exist: caches, environments, replays, build products."
    named = [('paths', 'cache'), ('paths', 'runs'), ('environments', 'train'), ('environments', 'serve')]
    found = [ROOT / setting(*key) for key in named] + [ROOT / name for name in MADE]
    found += sorted(p for top in ('package', 'tests', 'tools') for p in (ROOT / top).rglob('__pycache__'))
    return [p for p in found if p.is_dir() and inside(p)]


def inside(path):
    "True for a folder of the clone; what the settings put elsewhere is left to its owner."
    return path.resolve() != ROOT and ROOT in path.resolve().parents


def size(folder):
    "Bytes of the files under `folder`; a link counts for itself."
    return sum(p.lstat().st_size for p in folder.rglob('*') if not p.is_dir() or p.is_symlink())


def main():
    "List; remove when told to."
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('--yes', action='store_true')
    yes = p.parse_args().yes
    sizes = {folder: size(folder) for folder in folders()}
    for folder, n in sizes.items():
        print(f'{n / 1e6:10.1f} MB  {folder.relative_to(ROOT)}')
    print(
        f'{sum(sizes.values()) / 1e6:10.1f} MB  {"removed" if yes else "in all; nothing was removed: make clean YES=1"}'
    )
    if yes:
        for folder in sizes:
            shutil.rmtree(folder)


if __name__ == '__main__':
    main()
