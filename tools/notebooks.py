"""Notebooks as text: `edit` writes .text/NAME.py, `fold` puts it back, exports, runs and cleans."""

import argparse
import fcntl
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import readme

ROOT = Path(__file__).resolve().parent.parent
NBS, TEXT = ROOT / 'nbs', ROOT / '.text'
BIN = Path(sys.executable).parent


def chapters():
    "Every notebook of the book, in reading order."
    found = (p for p in NBS.rglob('*.ipynb') if not any(x.startswith(('.', '_')) for x in p.relative_to(NBS).parts))
    return sorted(found)


def resolve(name):
    "`recipe/01_spec` or `retros/NAME`, with or without `nbs/` and `.ipynb`, as (notebook, text file)."
    stem = name.removeprefix('nbs/').removesuffix('.ipynb').removesuffix('.py')
    return (ROOT if stem.startswith('retros/') else NBS) / f'{stem}.ipynb', TEXT / f'{stem}.py'


def run(*args):
    "Run a tool of this environment from the root; stop with its exit code when it fails."
    done = subprocess.run([str(a) for a in args], cwd=ROOT)
    if done.returncode:
        sys.exit(done.returncode)


@contextmanager
def export_lock():
    "One export at a time: every export rewrites the same module index."
    TEXT.mkdir(exist_ok=True)
    with open(TEXT / '.lock', 'w') as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


def export():
    "Compile every notebook into the package, in the house style."
    run(BIN / 'nbdev-export')
    if (NBS / 'index.ipynb').exists():
        readme.main()


def edit(name):
    "Write the notebook as py:percent text to the git-ignored folder `.text/`."
    nb, text = resolve(name)
    if not nb.is_file():
        sys.exit(f'{nb.relative_to(ROOT)} does not exist; write {text.relative_to(ROOT)} and fold it')
    if text.exists() and text.stat().st_mtime > nb.stat().st_mtime + 60:
        sys.exit(
            f'{text.relative_to(ROOT)} is newer than its notebook; fold it, or remove it to start from the notebook'
        )
    text.parent.mkdir(parents=True, exist_ok=True)
    run(BIN / 'jupytext', '--quiet', '--to', 'py:percent', nb, '-o', text)
    print(f'edit {text.relative_to(ROOT)}, then: make fold NB={nb.relative_to(NBS).with_suffix("")}')


def to_notebook(name):
    "Text to notebook; an existing notebook keeps its cell ids and tags."
    nb, text = resolve(name)
    if not text.is_file():
        sys.exit(f'{text.relative_to(ROOT)} does not exist; write it, or start with: make edit NB={name}')
    nb.parent.mkdir(parents=True, exist_ok=True)
    how = ['--update'] if nb.exists() else ['--set-kernel', 'python3']
    run(BIN / 'jupytext', '--quiet', '--to', 'ipynb', *how, text, '-o', nb)
    run(BIN / 'nbdev-clean', '--fname', nb)
    return nb


def say_unused(nb):
    "Print what ruff finds in the exported module: an import that only the notebook's checks use belongs in their cell."
    module = (
        ROOT
        / 'package'
        / 'ladderbook'
        / re.sub(r'(^|/)\d+[a-z]?_', r'\1', str(nb.relative_to(NBS))).replace('.ipynb', '.py')
    )
    if module.exists():
        subprocess.run([BIN / 'ruff', 'check', '--quiet', '--output-format=concise', module], cwd=ROOT)


def fold(name, execute=True):
    "Back from text: notebook, export, format, run with outputs saved, clean."
    with export_lock():
        nb = to_notebook(name)
        run(BIN / 'ruff', 'check', '--quiet', '--fix', nb)
        run(BIN / 'ruff', 'format', '--quiet', nb)
        export()
        if nb.is_relative_to(NBS):  # a retrospective compiles to nothing
            say_unused(nb)
    if execute:
        run(sys.executable, ROOT / 'tools' / 'check_notebook.py', nb, '--save')
        run(BIN / 'nbdev-clean', '--fname', nb)
    if nb == NBS / 'index.ipynb':
        readme.main()
    run(BIN / 'jupytext', '--quiet', '--to', 'py:percent', nb, '-o', resolve(name)[1])


def main():
    "The command line: `edit NAME`, `fold NAME`, `export`."
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('verb', choices=['edit', 'fold', 'export'])
    p.add_argument('name', nargs='?')
    p.add_argument('--no-run', action='store_true', help='fold without running the notebook')
    a = p.parse_args()
    if a.verb == 'export':
        with export_lock():
            return export()
    if not a.name:
        p.error('name a notebook, for example NB=recipe/01_spec')
    if a.verb == 'edit':
        return edit(a.name)
    return fold(a.name, not a.no_run)


if __name__ == '__main__':
    main()
