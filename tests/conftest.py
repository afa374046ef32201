"""One environment for every test: jax on the CPU, few threads, compiled code kept; cheap tests run first."""

import hashlib
import os
import platform
import re
import sys
from pathlib import Path

import hypothesis
import pytest
from ladderbook.settings import load

ROOT = Path(__file__).resolve().parent.parent
ORDER = [
    'test_house', 'test_recipe', 'test_data', 'test_model', 'test_optim', 'test_loop', 'test_replay', 'test_cli',
    'test_export', 'test_hub', 'test_harness', 'test_serve_hf', 'test_parity', 'test_vllm', 'test_server',
]  # fmt: skip
SERVED = {'test_serve_hf', 'test_parity', 'test_vllm', 'test_server'}
sys.path.insert(0, str(ROOT / 'tools'))


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


def _needs_serving(item) -> bool:
    if item.path.stem != 'test_notebooks':
        return item.path.stem in SERVED
    return '#| environment: serve' in (ROOT / item.callspec.params['notebook']).read_text(encoding='utf-8')


def pytest_collection_modifyitems(items):
    import environment

    items.sort(key=_rank)
    if why := environment.not_served():
        for item in filter(_needs_serving, items):
            item.add_marker(pytest.mark.skip(reason=f'not tried: {why}'))


@pytest.fixture(scope='session')
def serving() -> Path:
    "The Python of the serving environment; where there can be none, the test is not tried and says why."
    import environment

    if why := environment.not_served():
        pytest.skip(f'not tried: {why}')
    python = load().environments.serve / 'bin' / 'python'
    assert python.is_file(), 'the serving environment is missing; make it: make serve-env'
    return python


@pytest.fixture(scope='session')
def root() -> Path:
    return ROOT
