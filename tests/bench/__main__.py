"""`python -m tests.bench` is `python tests/bench/run.py`."""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
runpy.run_path(str(Path(__file__).with_name('run.py')), run_name='__main__')
