"""Adds to the wheel what a user without a clone needs: settings, rung notebooks, published records, locks."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
BUNDLE = (
    'settings.ini',
    'nbs/rungs',
    'artifacts/published',
    'artifacts/provenance',
    'containers/locks',
    'tests/data/tiny',
    'tests/data/forms',
    'tests/data/editions',
)


class BuildWithBundle(build_py):
    """Copies BUNDLE to `ladderbook/_bundle/`, where `ladderbook.settings.bundled` looks; an editable install needs none."""

    def run(self):
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / 'ladderbook' / '_bundle'
        shutil.rmtree(target, ignore_errors=True)
        for name in BUNDLE:
            source = ROOT / name
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target / name, ignore=shutil.ignore_patterns('.*', '__pycache__'))
            elif source.is_file():
                shutil.copy2(source, target / name)


setup(cmdclass={'build_py': BuildWithBundle})
