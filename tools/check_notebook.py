"""Runs one notebook as a test, in this process: types checked at run time, warnings from our own code are errors."""

import argparse
import sys
import warnings

OURS = r'(ladderbook(\..*)?|__main__)$'
CHECKER = 'beartype.beartype'


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
    watch_package()
    passed, _ = watch_cells()(a.notebook, skip_flags=['slow', 'gpu'], save=a.save)
    sys.exit(not passed)


if __name__ == '__main__':
    main()
