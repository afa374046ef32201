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
from ladderbook.recipe import rungs
from ladderbook.record import read_run, verify
from ladderbook.replay import rung, runners
from ladderbook.replay.summary import screen, summary
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
METRICS = {'schema': 'ladderbook.metrics', 'version': 1, 'loss': 1.0, 'dropped': [0.0]}
DEAF = """import json, pathlib, signal, time
heard = lambda *_: (pathlib.Path(folder).parent / 'asked').touch()
signal.signal(signal.SIGINT, heard)
(pathlib.Path(folder) / 'events.jsonl').write_text(json.dumps({'step': 1, 'loss': 8.0}) + '\\n')
while True:
    time.sleep(0.1)"""
FIGURES = f"import json, pathlib\n(pathlib.Path(folder) / 'metrics.json').write_text(json.dumps({METRICS!r}))"
LONG = 600  # seconds, for what takes two on a quiet machine: nothing here waits for a clock


@pytest.fixture(autouse=True)
def interrupts():
    "A shell that starts the tests in the background has them ignore SIGINT; here it is to arrive."
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


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


def a_run(tmp_path: Path, *sources: str, timeout: int = LONG, **parameters) -> rung.Replay:
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
    """Call `do` as soon as the run has logged `steps` steps; never, when it ends before."""

    def watch():
        log, end = plan.folder / 'events.jsonl', plan.folder / 'manifest.json'
        while not log.exists() or len(log.read_text().splitlines()) < steps:
            if end.exists():
                return
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


def advice(plan: rung.Replay) -> list[str]:
    "The last two lines of the screen, the command without its own name."
    lines = screen(summary(plan.folder) | {'options': ['--yes']}).splitlines()[-2:]
    return [lines[0], 'replay' + lines[1].split(' replay')[1]]


def test_two_quick_interrupts_are_one_request(tmp_path):
    plan = a_run(tmp_path, COUNT, FIGURES)
    (tmp_path / 'slow').touch()

    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)  # or the second is merged with the first
        os.kill(os.getpid(), signal.SIGINT)

    once_logged(plan, 3, twice)
    outcome = rung.replay(plan)
    assert (outcome.status, outcome.exit_code, outcome.reason) == ('interrupted', 130, 'stopped on request')
    check_record(plan, 'interrupted', 130)


def test_who_asks_again_does_not_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(runners, 'AGAIN', 0.0)
    monkeypatch.setattr(runners, 'GRACE', float(LONG))
    plan = a_run(tmp_path, DEAF)

    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        while not (tmp_path / 'asked').exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = once_logged(plan, 1, twice)
    assert (rung.replay(plan).exit_code, thread.is_alive()) == (130, False)
    check_record(plan, 'interrupted', 130)


def test_an_ignored_hangup_stays_ignored(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with runners.stop_signals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert (signal.getsignal(signal.SIGHUP), stop.number) == (signal.SIG_IGN, 0)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_termination_is_a_request_to_stop(tmp_path):
    plan = a_run(tmp_path, COUNT, FIGURES)
    (tmp_path / 'slow').touch()
    once_logged(plan, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert rung.replay(plan).exit_code == 143
    check_record(plan, 'interrupted', 143)
    assert advice(plan) == ['goes on      from the start (no checkpoint yet), with', 'replay stand-in --seed 0 --yes']
    (plan.folder / 'checkpoints').mkdir()
    (plan.folder / 'checkpoints' / '2.json').touch()
    assert advice(plan)[0] == 'goes on      after step 2, with'
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_timeout_kills_what_does_not_listen(tmp_path, monkeypatch):
    """The clock jumps once the kernel is deaf, so that it does not matter how long it took to start."""
    monkeypatch.setattr(runners, 'GRACE', 1.0)
    late, real = threading.Event(), time.monotonic
    monkeypatch.setattr(time, 'monotonic', lambda: real() + (LONG if late.is_set() else 0))
    plan = a_run(tmp_path, DEAF)
    once_logged(plan, 1, late.set)
    outcome = rung.replay(plan)
    assert (outcome.status, outcome.exit_code) == ('timeout', 124) and f'{LONG} s' in outcome.reason
    check_record(plan, 'timeout', 124)


def test_killed_kernel_is_told_as_killed(tmp_path):
    plan = a_run(tmp_path, COUNT, 'import os, signal\nos.kill(os.getpid(), signal.SIGKILL)', FIGURES)
    outcome = rung.replay(plan)
    assert (outcome.status, outcome.exit_code) == ('killed', 137) and 'SIGKILL' in outcome.reason
    observed = check_record(plan, 'killed', 137)
    assert advice(plan)[1] == 'replay stand-in --seed 0 --yes'
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
    with pytest.raises(IntegrityError, match='events.jsonl.*--fresh'):
        rung.replay(plan)
    (plan.folder / 'manifest.json').unlink()
    with pytest.raises(IntegrityError, match='no manifest.json: it finished, .*--fresh'):
        rung.replay(plan)
    assert rung.replay(plan, fresh=True).status == 'finished'
    assert len(check_record(plan, 'finished', 0)['attempts']) == 1
    assert len(record.read_lines(plan.folder / 'events.jsonl')) == 8


DISK = """import json, pathlib
log = pathlib.Path(folder) / 'events.jsonl'
if not log.exists():
    log.write_text(json.dumps({'step': 1, 'loss': 8.0}) + '\\n')
    f = open(pathlib.Path(folder) / 'timings.jsonl', 'ab', buffering=0)
    while True:
        f.write(b'{"step": 1, "seconds": 0.5}\\n' * 1000 + b'{"step": 1, "sec')"""


@pytest.fixture
def small_disk(tmp_path):
    "A file system of 12 MB, where this user may mount one."
    place = tmp_path / 'disk'
    place.mkdir()
    if subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=12m', 'tmpfs', place], capture_output=True).returncode:
        pytest.skip('no file system can be mounted here')
    yield place
    subprocess.run(['umount', '-l', place], check=True)


def test_a_full_disk_is_told_and_the_run_goes_on_when_there_is_room(small_disk):
    """The disk fills while a log is written: no room for the notebook either, but for the record there is."""
    plan = a_run(small_disk, DISK, FIGURES)
    outcome = rung.replay(plan)
    assert (outcome.status, outcome.exit_code) == ('failed', 5) and 'No space left' in outcome.reason
    observed = check_record(plan, 'failed', 5)
    assert 'the disk is full' in observed['reason'] and not (plan.folder / '.reserve').exists()
    (plan.folder / 'timings.jsonl').write_bytes((plan.folder / 'timings.jsonl').read_bytes()[-500:])
    assert rung.replay(plan).status == 'finished'
    check_record(plan, 'finished', 0)


def test_a_full_device_is_told_as_a_full_disk(tmp_path):
    plan = a_run(tmp_path, "f = open('/dev/full', 'w')\nf.write('x')\nf.flush()")
    outcome = rung.replay(plan)
    assert (outcome.status, outcome.exit_code) == ('failed', 5)
    assert outcome.reason == 'the disk is full: [Errno 28] No space left on device'
    check_record(plan, 'failed', 5)


def test_a_log_torn_by_a_kill_is_cut_back_before_the_next_attempt(tmp_path):
    plan = a_run(tmp_path, COUNT, FIGURES)
    plan.folder.mkdir()
    record.write_run(plan.folder, plan.identity, record.ended(record.observe(record.stamp()), 'killed', 137, 1.0))
    (plan.folder / 'events.jsonl').write_text('{"step": 1, "loss": 8.0}\n{"step": 2, "lo')
    (plan.folder / 'timings.jsonl').write_text('{"step": 1}\n{"ste')
    assert rung.replay(plan).status == 'finished'
    assert [e['step'] for e in record.read_lines(plan.folder / 'events.jsonl')] == list(range(1, 9))
    assert (plan.folder / 'timings.jsonl').read_text() == '{"step": 1}\n'


@pytest.mark.parametrize(
    'name, harm, key',
    [
        ('run.json', lambda v: v['observed'].pop('attempts'), 'observed.attempts'),
        ('run.json', lambda v: v['observed'].update(attempts=[{'status': 'killed'}]), 'observed.attempts.0.seconds'),
        ('run.json', lambda v: v['observed'].update(status=3), 'observed.status'),
        ('run.json', lambda v: v.pop('identity'), 'identity'),
        ('run.json', lambda v: v['identity'].update(seed='0'), 'identity.seed'),
        ('manifest.json', lambda v: v.pop('files'), 'files'),
        ('manifest.json', lambda v: v['files'].update({'run.json': 'x'}), 'files.run.json'),
        ('manifest.json', lambda v: v.pop('digests'), 'digests'),
    ],
)
def test_a_record_without_a_key_is_refused_by_file_and_key_and_can_be_replaced(tmp_path, name, harm, key):
    plan = a_run(tmp_path, '')
    a_finished_record(plan)
    value = json.loads((plan.folder / name).read_text())
    harm(value)
    (plan.folder / name).write_text(json.dumps(value))
    with pytest.raises(IntegrityError, match=f'{name}.* {key}[ ;].*--fresh') as e:
        rung.replay(plan)
    assert e.value.exit_code == 3 and '\n' not in str(e.value)


def a_finished_record(plan: rung.Replay) -> None:
    record.write_run(plan.folder, plan.identity, record.ended(record.observe(record.stamp()), 'finished', 0, 1.0))
    (plan.folder / 'events.jsonl').write_text('{"step": 1, "loss": 8.0}\n')
    record.write_manifest(plan.folder)


@pytest.mark.parametrize('name', ['events.jsonl', 'timings.jsonl'])
@pytest.mark.parametrize(
    'line, words',
    [('{"loss": 8.0}', 'lacks the key step'), ('{"step": "1"}', "step is '1'; expected int"), ('[1]', 'an object')],
)
def test_a_log_line_without_a_step_is_refused_before_the_run_goes_on(tmp_path, name, line, words):
    plan = a_run(tmp_path, COUNT, FIGURES)
    record.write_run(plan.folder, plan.identity, record.ended(record.observe(record.stamp()), 'interrupted', 130, 1.0))
    before = (plan.folder / 'run.json').read_bytes()
    (plan.folder / name).write_text(f'{{"step": 1}}\n{line}\n')
    with pytest.raises(IntegrityError, match='line 2') as e:
        rung.replay(plan)
    assert words in str(e.value) and name in str(e.value)
    assert (plan.folder / 'run.json').read_bytes() == before and not (plan.folder / 'rung.ipynb').exists()


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
    waiting = once_logged(plan, 3, lambda: None)
    waiting.join(LONG)
    assert not waiting.is_alive()
    with pytest.raises(LockedError, match=f'process {other.pid}') as e:
        rung.replay(plan)
    assert e.value.exit_code == 7
    child = read_run(plan.folder)['observed']['process']
    assert rung._is_alive(child)
    other.kill()
    other.wait()
    until = time.monotonic() + LONG
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


SIZES = {'layers': 2, 'experts': 8, 'sequence': 64, 'window': 32, 'batch': 4, 'vocab': 512, 'tokens': 3072}


def tiny(**changes) -> dict:
    "Parameters of a rung that the corpus of the tests can train, but for the `changes`."
    return {'corpus': 'tiny', 'changes': ' '.join(f'{k}:{v}' for k, v in (SIZES | changes).items())}


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
        ('desk-micro', {'experts': 'bogus'}, UsageError, 'dropless, capacity'),
        ('desk-micro', {'corpus': 'tiny'}, UsageError, 'vocab is 4096; expected 512'),
        ('desk-micro', tiny(sequence=192), UsageError, 'sequence is 192'),
        ('desk-micro', tiny(layers=0), UsageError, 'layers is 0'),
        ('desk-micro', tiny(head_dim=33), UsageError, 'head_dim = 33'),
        ('desk-micro', tiny(layers=5000), UsageError, 'at most 1,024'),
        ('desk-micro', tiny(optimizer='adamw'), UsageError, 'muonh, adamh'),
        ('desk-micro', tiny(generation='delphi-v1'), UsageError, 'muonh, adamh'),
        ('desk-micro', tiny(newton_schulz_steps=6), UsageError, '1 to 5'),
        ('desk-micro', tiny(warmup_steps=12), UsageError, 'fewer than the 12'),
        ('desk-micro', tiny(decay_steps=0), UsageError, '1 or more'),
        ('desk-micro', {'seed': '9' * 5000}, UsageError, '18 digits'),
        ('desk-micro', {'seed': '1²'}, UsageError, 'expected int'),
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


def moved(tmp_path):
    here = load()
    return replace(here, paths=replace(here.paths, runs=tmp_path / 'runs', cache=tmp_path / 'cache'))


def test_a_row_longer_than_the_corpus_and_a_timeout_of_nothing(tmp_path):
    given = tiny(sequence=131_072, batch=1, tokens=1e6, layers=1)
    with pytest.raises(UsageError, match='too few for a row of 131072'):
        rung.prepare('desk-micro', given, moved(tmp_path))
    with pytest.raises(UsageError, match='timeout is 0'):
        rung.prepare('desk-micro', {}, moved(tmp_path), timeout=0)
    with pytest.raises(UsageError, match="no runner is called ''"):
        rung.prepare('desk-micro', {}, moved(tmp_path), runner_name='')


def test_a_changed_rung_is_judged_by_what_it_takes(tmp_path):
    plain = rung.prepare('desk-micro', tiny(), moved(tmp_path))
    longer = rung.prepare('desk-micro', tiny(tokens=3e8), moved(tmp_path))
    assert plain.minutes < 1 and longer.minutes > 30
    wide = tiny(experts=65_536, expert_width=4096, latent_width=4096, tokens=1e7)
    with pytest.raises(ResourceError, match='desk-micro needs .* GB of'):
        rung.prepare('desk-micro', wide, moved(tmp_path))
    assert not (tmp_path / 'runs').exists()


def test_a_damaged_record_can_be_replaced(tmp_path):
    here, given = moved(tmp_path), tiny()
    folder = rung.prepare('desk-micro', given, here).folder
    folder.mkdir(parents=True)
    (folder / 'run.json').write_text('{"schema": "ladderbook.run", "version": 1}')
    with pytest.raises(IntegrityError, match='lacks the key identity; .*--fresh'):
        rung.prepare('desk-micro', given, here)
    assert rung.prepare('desk-micro', given, here, fresh=True).state == 'damaged'


def test_what_is_refused_without_jax_is_what_jax_refuses():
    """The constants that `check_rung` holds against a rung are those of the training side."""
    from ladderbook.model import lm
    from ladderbook.replay.parameters import parameters
    from ladderbook.settings import bundled
    from ladderbook.train import loop, optim, step

    assert lm.Compute().attention_block == rung.ATTENTION_BLOCK == step.DESK.compute.attention_block
    assert len(optim.QUINTIC) == rung.NEWTON_SCHULZ
    assert parameters(bundled('nbs', 'rungs', 'desk.ipynb'))['experts'].choices == tuple(step.EXPERTS)
    assert (5 * loop.EVAL_ROWS, 5 * loop.FINAL_ROWS) == rungs.EVALUATED
    text = {'vocab': 512, 'tokens': 40_960}
    for name in rung.TRAINED:
        step.program(rungs.changed(rungs.rung('desk-micro'), optimizer=name, **text).recipe)
    with pytest.raises(UsageError, match='on paper only'):
        step.program(rungs.changed(rungs.rung('desk-micro'), optimizer='adamw', **text).recipe)
