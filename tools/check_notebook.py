"""Runs one notebook as a test, in this process: types checked at run time, warnings from our own code are errors."""

import argparse
import json
import os
import re
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = ('train', 'serve')
OURS = r'(ladderbook(\..*)?|__main__)$'
CHECKER = 'beartype.beartype'


def environment(notebook):
    "The folder of the environment that the first code cell names (`#| environment: serve`), or None for this one."
    book = json.loads(Path(notebook).read_text(encoding='utf-8'))
    first = next((''.join(c['source']) for c in book['cells'] if c['cell_type'] == 'code'), '')
    if not (found := re.search(r'^#\|\s*environment:\s*(\S+)\s*$', first, re.MULTILINE)):
        return None
    if found[1] not in ENVIRONMENTS:
        sys.exit(f'{notebook}: no environment is called {found[1]!r}; known: {", ".join(ENVIRONMENTS)}')
    from environment import setting

    return ROOT / setting('environments', found[1])


def move(notebook):
    "Start again in the environment that the notebook names, unless this is it."
    folder = environment(notebook)
    if folder is None or Path(sys.prefix) == folder:
        return
    python = folder / 'bin' / 'python'
    if not python.exists():
        sys.exit(f'{notebook} runs in {folder.name}, which is not there; make it: make serve-env')
    os.execv(python, [str(python), *sys.argv])


def watch_package():
    "Check the annotations of the package at run time; make warnings raised by our own code errors."
    from jaxtyping import install_import_hook

    install_import_hook('ladderbook', CHECKER)
    warnings.filterwarnings('error', module=OURS)


def watch_cells():
    "Check the annotations of what the notebook itself defines, too."
    import nbdev.test
    from jaxtyping._import_hook import JaxtypingTransformer, Typechecker

    class WatchedShell(nbdev.test.CaptureShell):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.ast_transformers.append(JaxtypingTransformer(typechecker=Typechecker(CHECKER)))

    nbdev.test.CaptureShell = WatchedShell
    return nbdev.test.test_nb


def main():
    "Run the notebook; exit 1 when a cell fails."
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('notebook')
    p.add_argument('--save', action='store_true', help='write the outputs into the notebook when it passes')
    a = p.parse_args()
    move(a.notebook)
    watch_package()
    passed, _ = watch_cells()(a.notebook, skip_flags=['slow', 'gpu'], save=a.save)
    sys.exit(not passed)


if __name__ == '__main__':
    main()
