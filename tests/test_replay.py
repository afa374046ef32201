"""Runs that end in every way: the record must be complete and true, and a rerun must go on or refuse."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from ladderbook import record
from ladderbook.errors import DriftError, IntegrityError, LockedError, ResourceError, UsageError
from ladderbook.files import lock
from ladderbook.record import read_run, verify
from ladderbook.replay import rung, runners
from ladderbook.settings import load

HEAD = "folder: str = ''\nthreads: int = 1\nstop_after: int = 0"
COUNT = """import json, pathlib, time
log = pathlib.Path(folder) / 'events.jsonl'
done = len(log.read_text().splitlines()) if log.exists() else 0
for step in range(done + 1, 9):
    with open(log, 'a') as f:
        f.write(json.dumps({'step': step, 'loss': 8.0 / step}) + '\\n')
    if (pathlib.Path(folder).parent / 'slow').exists() and step >= 3:
        time.sleep(60)"""
FIGURES = "(pathlib.Path(folder) / 'metrics.json').write_text(json.dumps({'loss': 1.0}))"


def write_notebook(path: Path, *sources: str) -> Path:
    cells = [
        {
            'cell_type': 'code',
            'id': f'c{n}',
            'metadata': {'tags': ['parameters']} if n == 0 else {},
            'source': s,
            'outputs': [],
            'execution_count': None,
        }
        for n, s in enumerate(sources)
    ]
    kernel = {'kernelspec': {'name': 'python3', 'language': 'python', 'display_name': 'python3'}}
    path.write_text(json.dumps({'cells': cells, 'metadata': kernel, 'nbformat': 4, 'nbformat_minor': 5}))
    return path


def a_run(tmp_path: Path, *sources: str, timeout: int = 100, **parameters) -> rung.Replay:
    note = write_notebook(tmp_path / 'in.ipynb', HEAD, *sources)
    folder = tmp_path / 'run'
    return rung.Replay(
        name='stand-in',
        notebook=note,
        parameters={'folder': str(folder), 'threads': 1, 'stop_after': 0, **parameters},
        identity={'rung': 'stand-in', 'seed': 0},
        folder=folder,
        runner='host',
        timeout=timeout,
        cache=tmp_path / 'cache',
        steps=8,
        tokens=8,
        minutes=None,
        memory=0,
        drift=(),
        state='new',
    )


def check_record(plan: rung.Replay, status: str, code: int) -> dict:
    """Whatever happened: run.json says it, the manifest holds, the notebook agrees, and nothing is left running."""
    observed = read_run(plan.folder)['observed']
    assert (observed['status'], observed['exit_code']) == (status, code), observed
    assert observed['attempts'][-1]['seconds'] > 0 and 'process' not in observed
    assert 'run.json' in verify(plan.folder)['files']
    if (plan.folder / 'rung.ipynb').is_file():
        nb = json.loads((plan.folder / 'rung.ipynb').read_text())
        assert nb['metadata']['ladderbook']['status'] == status
    with lock(plan.folder / 'run.lock', 'test'):
        return observed


def once_logged(plan: rung.Replay, steps: int, do) -> threading.Thread:
    """Call `do` as soon as the run has logged `steps` steps."""

    def watch():
        log = plan.folder / 'events.jsonl'
        while not log.exists() or len(log.read_text().splitlines()) < steps:
            time.sleep(0.05)
        do()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def test_interrupted_then_resumed(tmp_path):
    plan = a_run(tmp_path, COUNT, FIGURES)
    (tmp_path / 'slow').touch()
    once_logged(plan, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
    outcome = rung.replay(plan)
    assert (outcome.status, outcome.exit_code) == ('interrupted', 130)
    check_record(plan, 'interrupted', 130)
    cell = read_run(plan.folder)['observed']['attempts'][0]['cell']
    nb = json.loads((plan.folder / 'rung.ipynb').read_text())
    assert 'KeyboardInterrupt' in json.dumps(nb) and cell is not None
    (tmp_path / 'slow').unlink()
    assert rung.replay(plan).status == 'finished'
    observed = check_record(plan, 'finished', 0)
    assert [a['status'] for a in observed['attempts']] == ['interrupted', 'finished']
    assert [e['step'] for e in record.read_lines(plan.folder / 'events.jsonl')] == list(range(1, 9))


def test_termination_is_a_request_to_stop(tmp_path):
    plan = a_run(tmp_path, COUNT, FIGURES)
    (tmp_path / 'slow').touch()
    once_logged(plan, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert rung.replay(plan).exit_code == 143
    check_record(plan, 'interrupted', 143)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_timeout_kills_what_does_not_listen(tmp_path, monkeypatch):
    monkeypatch.setattr(runners, 'GRACE', 1.0)
    deaf = 'import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True:\n    time.sleep(0.1)'
    plan = a_run(tmp_path, deaf, timeout=4)
    outcome = rung.replay(plan)
    assert (outcome.status, outcome.exit_code) == ('timeout', 124) and '4 s' in outcome.reason
    check_record(plan, 'timeout', 124)


def test_killed_kernel_is_told_as_killed(tmp_path):
    plan = a_run(tmp_path, COUNT, 'import os, signal\nos.kill(os.getpid(), signal.SIGKILL)', FIGURES)
    outcome = rung.replay(plan)
    assert (outcome.status, outcome.exit_code) == ('killed', 137) and 'SIGKILL' in outcome.reason
    observed = check_record(plan, 'killed', 137)
    cells = json.loads((plan.folder / 'rung.ipynb').read_text())['cells']
    assert [c['metadata'].get('papermill', {}).get('status') for c in cells][-2:] == ['failed', 'pending']
    assert observed['attempts'][0]['cell'] == len(cells) - 3  # counted without the line on top
    assert not (plan.folder / 'metrics.json').exists()


@pytest.mark.parametrize(
    'source, status, code, words',
    [
        (
            "from ladderbook.errors import NumericsError\nraise NumericsError('loss is NaN at step 3')",
            'numerics',
            6,
            'NaN',
        ),
        ("raise ValueError('odd')", 'failed', 1, 'ValueError: odd'),
        ('', 'failed', 3, 'metrics.json'),
    ],
)
def test_failures_keep_their_code(tmp_path, source, status, code, words):
    plan = a_run(tmp_path, source)
    outcome = rung.replay(plan)
    assert (outcome.status, outcome.exit_code) == (status, code) and words in outcome.reason
    assert words in check_record(plan, status, code)['reason']


def test_stop_after_is_an_interruption_that_succeeded(tmp_path):
    plan = a_run(tmp_path, '', stop_after=3)
    outcome = rung.replay(plan)
    assert (outcome.status, outcome.exit_code) == ('interrupted', 0) and 'step 3' in outcome.reason
    check_record(plan, 'interrupted', 0)


def test_finished_is_verified_kept_and_replaced_only_when_fresh(tmp_path):
    plan = a_run(tmp_path, COUNT, FIGURES)
    assert rung.replay(plan).status == 'finished'
    before = check_record(plan, 'finished', 0)
    assert rung.replay(plan).already
    assert read_run(plan.folder)['observed'] == before
    (plan.folder / 'events.jsonl').write_text('{"step": 1, "loss": 0.1}\n')
    with pytest.raises(IntegrityError, match='events.jsonl'):
        rung.replay(plan)
    assert rung.replay(plan, fresh=True).status == 'finished'
    assert len(check_record(plan, 'finished', 0)['attempts']) == 1
    assert len(record.read_lines(plan.folder / 'events.jsonl')) == 8


SECOND = """
import json, sys
from pathlib import Path
from ladderbook.replay import rung
d = json.loads(sys.argv[1])
d |= {k: Path(d[k]) for k in ('notebook', 'folder', 'cache')} | {'drift': ()}
sys.exit(rung.replay(rung.Replay(**d)).exit_code)
"""


def test_second_start_is_refused_and_a_killed_command_leaves_nothing_running(tmp_path):
    plan = a_run(tmp_path, COUNT, FIGURES)
    (tmp_path / 'slow').touch()
    text = json.dumps({k: getattr(plan, k) for k in plan.__slots__}, default=str)
    other = subprocess.Popen([sys.executable, '-c', SECOND, text], stderr=subprocess.DEVNULL)
    once_logged(plan, 3, lambda: None).join(60)
    with pytest.raises(LockedError, match=f'process {other.pid}') as e:
        rung.replay(plan)
    assert e.value.exit_code == 7
    child = read_run(plan.folder)['observed']['process']
    assert rung._is_alive(child)
    other.kill()
    other.wait()
    until = time.monotonic() + 10
    while rung._is_alive(child) and time.monotonic() < until:
        time.sleep(0.1)
    assert not rung._is_alive(child)
    assert read_run(plan.folder)['observed']['status'] == 'running'
    (tmp_path / 'slow').unlink()
    assert rung.replay(plan).status == 'finished'
    observed = check_record(plan, 'finished', 0)
    assert [a['status'] for a in observed['attempts']] == ['killed', 'finished']
    assert len(record.read_lines(plan.folder / 'events.jsonl')) == 8


def test_a_start_waits_for_proof_of_death(tmp_path):
    import psutil

    plan = a_run(tmp_path, FIGURES)
    plan.folder.mkdir()
    me = {'pid': os.getpid(), 'born': psutil.Process().create_time()}
    record.write_run(plan.folder, plan.identity, {**record.observe(record.stamp()), 'process': me})
    with pytest.raises(LockedError, match=f'process {os.getpid()}'):
        rung.replay(plan)


def test_secrets_stay_out(tmp_path, monkeypatch):
    secret = 'hf_"abc"_0123456789'
    monkeypatch.setenv('HUB_TOKEN', secret)
    (tmp_path / 'leak').write_text(secret)
    show = "import os, json, pathlib\nprint(os.environ.get('HUB_TOKEN'), os.environ['NPROC'])"
    leak = "print((pathlib.Path(folder).parent / 'leak').read_text())"
    fall = "raise ValueError((pathlib.Path(folder).parent / 'leak').read_text())"
    plan = a_run(tmp_path, show, leak, fall)
    assert rung.replay(plan).status == 'failed'
    check_record(plan, 'failed', 1)
    whole = {p.name: p.read_text() for p in plan.folder.iterdir() if p.is_file()}
    assert not [n for n, text in whole.items() if 'abc' in text and '0123456789' in text]
    assert 'None 1' in whole['rung.ipynb'] and '[HUB_TOKEN removed]' in whole['rung.ipynb']
    assert '[HUB_TOKEN removed]' in whole['run.json']


def test_a_wrong_lock_is_drift(tmp_path):
    path = tmp_path / 'train.lock'
    path.write_text('numpy==0.1\n')
    with pytest.raises(DriftError, match='lock: 0.1') as e:
        record.require_lock(path)
    assert e.value.exit_code == 4 and '--allow-drift' in str(e.value)
    assert record.drift(load().home.joinpath('containers/locks/train.lock').read_text(), None) == []


@pytest.mark.parametrize(
    'name, given, error, words',
    [
        ('desk-mirco', {}, UsageError, 'desk-micro'),
        ('hero', {}, ResourceError, 'accelerators'),
        ('desk-micro', {'sed': '1'}, UsageError, 'seed'),
        ('desk-micro', {'seed': 'one'}, UsageError, 'expected int'),
        ('desk-micro', {'seed': '-1'}, UsageError, 'expected 0 to'),
        ('desk-micro', {'threads': '9999'}, ResourceError, 'threads'),
        ('desk-micro', {'corpus': 'desk-v9'}, UsageError, 'desk-v0'),
        ('desk-micro', {'changes': 'bacth=2'}, UsageError, 'batch'),
        ('desk-micro', {'changes': 'batch'}, UsageError, 'name=value'),
    ],
)
def test_bad_input_is_refused_before_anything_starts(tmp_path, name, given, error, words):
    here = load()
    here = replace(here, paths=replace(here.paths, runs=tmp_path / 'runs', cache=tmp_path / 'cache'))
    with pytest.raises(error, match=words):
        rung.prepare(name, given, here)
    assert not (tmp_path / 'runs').exists()


def test_missing_corpus_and_unknown_runner(tmp_path):
    here = load()
    here = replace(here, paths=replace(here.paths, runs=tmp_path / 'runs', cache=tmp_path / 'cache'))
    with pytest.raises(ResourceError, match='ladderbook data build'):
        rung.prepare('desk-micro', {'corpus': 'desk-v0'}, here)
    with pytest.raises(UsageError, match='known: host'):
        rung.prepare('desk-micro', {}, here, runner_name='docker')
