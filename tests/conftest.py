"""One environment for every test: jax on the CPU, few threads, compiled code kept; cheap tests run first."""

import hashlib
import os
import platform
import re
from pathlib import Path

import hypothesis
import pytest
from ladderbook.settings import load

ROOT = Path(__file__).resolve().parent.parent
ORDER = ['test_house', 'test_recipe', 'test_data', 'test_model', 'test_optim', 'test_loop', 'test_replay', 'test_cli']


def _kind_of_cpu() -> str:
    "Compiled code fits one kind of CPU: a short digest of its name."
    info = Path('/proc/cpuinfo')
    names = re.findall(r'^model name.*$', info.read_text(), re.MULTILINE) if info.exists() else []
    return hashlib.sha256((names[0] if names else platform.machine()).encode()).hexdigest()[:12]


# Set before anything imports jax; kept compiled code saves a second run most of its compiling.
os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ.setdefault('OMP_NUM_THREADS', '2')
os.environ.setdefault('OPENBLAS_NUM_THREADS', '2')
os.environ.setdefault('MPLBACKEND', 'agg')
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(load().paths.cache / 'compiled' / f'tests-{_kind_of_cpu()}'))
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.3')

# The same examples on every run, so that a red test is the code's doing; `HYPOTHESIS_PROFILE=search` looks for new ones.
hypothesis.settings.register_profile('fixed', derandomize=True)
hypothesis.settings.register_profile('search', max_examples=500)
hypothesis.settings.load_profile(os.environ.get('HYPOTHESIS_PROFILE', 'fixed'))


def _rank(item):
    name = item.path.stem
    place = ORDER.index(name) if name in ORDER else len(ORDER)
    return (item.get_closest_marker('end_to_end') is not None, name == 'test_notebooks', place)


def pytest_collection_modifyitems(items):
    items.sort(key=_rank)


@pytest.fixture(scope='session')
def root() -> Path:
    return ROOT
