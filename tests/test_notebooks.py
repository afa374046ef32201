"""Every chapter runs from top to bottom, in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RUNNER = ROOT / 'tools' / 'check_notebook.py'
FOLDERS = ('nbs', 'retros')


def chapters():
    found = [p.relative_to(ROOT) for folder in FOLDERS for p in (ROOT / folder).rglob('*.ipynb')]
    return sorted(str(p) for p in found if not any(part.startswith(('.', '_')) for part in p.parts))


def run(notebook):
    return subprocess.run([sys.executable, RUNNER, notebook], cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize('notebook', chapters())
def test_notebook(notebook):
    done = run(notebook)
    assert done.returncode == 0, done.stderr[-6000:]
