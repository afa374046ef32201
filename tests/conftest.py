"""One environment for every test: jax on the CPU, few threads, compiled code kept; cheap tests run first."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ORDER = ['test_house', 'test_recipe', 'test_data', 'test_model', 'test_optim', 'test_loop', 'test_replay', 'test_cli']

# before anything imports jax
os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ.setdefault('OMP_NUM_THREADS', '2')
os.environ.setdefault('OPENBLAS_NUM_THREADS', '2')
os.environ.setdefault('MPLBACKEND', 'agg')


def _rank(item):
    name = item.path.stem
    place = ORDER.index(name) if name in ORDER else len(ORDER)
    return (item.get_closest_marker('end_to_end') is not None, name == 'test_notebooks', place)


def pytest_collection_modifyitems(items):
    items.sort(key=_rank)


@pytest.fixture(scope='session')
def root() -> Path:
    return ROOT
