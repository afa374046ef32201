"""The training loop as a whole: one executable, resume to the bit, faults that name their step and tensor."""

import json
import shlex
import shutil
import subprocess

import numpy as np
import pytest
from ladderbook.data.tokens import tiny
from ladderbook.errors import IntegrityError, NumericsError, ResourceError, UsageError
from ladderbook.recipe import rungs
from ladderbook.science.evals import evaluator
from ladderbook.train import checkpoint, events, loop, step

SIZES = {
    'layers': 2,
    'experts': 8,
    'sequence': 64,
    'window': 32,
    'batch': 4,
    'vocab': 512,
    'tokens': 8 * 4 * 64,
    'evaluations': 2,
}
MICRO = rungs.changed(rungs.rung('desk-micro'), **SIZES)


@pytest.fixture(scope='module')
def text(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp('corpus') / 'tiny')


@pytest.fixture(scope='module')
def held_out(text):
    return evaluator(MICRO.recipe.spec, text, batch=4)


@pytest.fixture(scope='module')
def whole(text, held_out, tmp_path_factory):
    folder = tmp_path_factory.mktemp('whole') / 'run'
    return folder, loop.train(MICRO, text, folder, 0, held_out)


def test_the_step_is_traced_once_whatever_happens_around_it(text, held_out, tmp_path, monkeypatch):
    traced = []
    plain = step.take_step
    monkeypatch.setattr(step, 'take_step', lambda *a: traced.append(1) or plain(*a))
    step.compiled.cache_clear()
    for stop in (3, 0):  # logs, evaluates, saves, stops between milestones, restores, goes on
        loop.train(MICRO, text, tmp_path / 'run', 0, held_out, stop_after=stop)
    assert len(traced) == 1


@pytest.mark.parametrize('stop', [1, 4, 7])
def test_resumed_anywhere_is_the_run_that_never_stopped(text, held_out, whole, tmp_path, stop):
    folder, result = whole
    loop.train(MICRO, text, tmp_path / 'run', 0, held_out, stop_after=stop)
    again = loop.train(MICRO, text, tmp_path / 'run', 0, held_out)
    assert (tmp_path / 'run' / 'events.jsonl').read_bytes() == (folder / 'events.jsonl').read_bytes()
    assert again.parameters == result.parameters
    assert again.evaluation == result.evaluation


def test_a_crash_after_the_log_and_before_the_checkpoint_leaves_no_double_lines(text, held_out, whole, tmp_path):
    folder, _ = whole
    loop.train(MICRO, text, tmp_path / 'run', 0, held_out, stop_after=5)
    log = tmp_path / 'run' / 'events.jsonl'
    for s in (6, 7):
        events.append(log, {'step': s, 'loss': 1.0})
    with open(log, 'a') as f:
        f.write('{"step":8,"los')
    loop.train(MICRO, text, tmp_path / 'run', 0, held_out)
    assert log.read_bytes() == (folder / 'events.jsonl').read_bytes()


def test_a_finished_run_started_again_takes_no_step(text, held_out, whole):
    folder, result = whole
    before = (folder / 'events.jsonl').read_bytes()
    again = loop.train(MICRO, text, folder, 0, held_out)
    assert (again.step, again.finished, again.parameters) == (result.step, True, result.parameters)
    assert (folder / 'events.jsonl').read_bytes() == before


def poison(monkeypatch, at):
    plain = loop.batches

    def poisoned(*args, start=0, **kwargs):
        for i, batch in enumerate(plain(*args, start=start, **kwargs), start + 1):
            yield batch | {'weights': batch['weights'] * np.float32(np.nan)} if i == at else batch

    monkeypatch.setattr(loop, 'batches', poisoned)


def test_nan_stops_with_step_and_tensor_and_the_run_can_go_on(text, held_out, whole, tmp_path, monkeypatch):
    with monkeypatch.context() as m:
        poison(m, at=6)
        with pytest.raises(NumericsError, match=r'step 6: gradient of \S+ is not finite') as e:
            loop.train(MICRO, text, tmp_path / 'run', 0, held_out)
    assert e.value.exit_code == 6
    last = events.read(tmp_path / 'run' / 'events.jsonl')[-1]
    assert last['step'] == 6 and last['fault'].startswith('gradient of ')
    assert checkpoint.steps(tmp_path / 'run' / 'checkpoints') == [4]
    result = loop.train(MICRO, text, tmp_path / 'run', 0, held_out)
    assert result.parameters == whole[1].parameters


def test_a_damaged_checkpoint_is_refused_with_the_command_that_uses_the_older_one(text, held_out, whole, tmp_path):
    loop.train(MICRO, text, tmp_path / 'run', 0, held_out, stop_after=5)
    saved = sorted(p for p in (tmp_path / 'run/checkpoints/5').rglob('*') if p.is_file() and p.stat().st_size > 100)
    saved[-1].write_bytes(saved[-1].read_bytes()[:-7])
    with pytest.raises(IntegrityError, match=r'checkpoint 5: .* older checkpoints: \[4\]; .* from step 4') as e:
        loop.train(MICRO, text, tmp_path / 'run', 0, held_out)
    command = str(e.value).split('step 4: ')[1].split(', then')[0]
    subprocess.run(shlex.split(command), check=True)
    again = loop.train(MICRO, text, tmp_path / 'run', 0, held_out)
    assert again.parameters == whole[1].parameters
    assert (tmp_path / 'run' / 'events.jsonl').read_bytes() == (whole[0] / 'events.jsonl').read_bytes()


@pytest.mark.parametrize(
    'harm, words',
    [
        (lambda v: v.pop('files'), 'lacks the key files'),
        (lambda v: v.pop('run'), 'lacks the key run'),
        (lambda v: v.update(step='4'), "step is '4'; expected int"),
        (lambda v: v['files'].update(x={'size': 1}), 'lacks the key files.x.sha256'),
    ],
)
def test_a_commit_mark_without_a_key_is_refused(whole, tmp_path, harm, words):
    folder = shutil.copytree(whole[0] / 'checkpoints', tmp_path / 'checkpoints')
    mark = json.loads((folder / '8.json').read_text())
    harm(mark)
    (folder / '8.json').write_text(json.dumps(mark))
    with pytest.raises(IntegrityError, match=r'8\.json') as e:
        checkpoint.verify(folder, 8, whole[0].name)
    assert words in str(e.value) and 'older checkpoints: [4]' in str(e.value)


def in_pages(folder):
    return sum(-(-p.stat().st_size // 4096) * 4096 for p in folder.rglob('*') if p.is_file())


@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')  # of a loop that orbax left half done
def test_a_disk_that_fills_while_a_checkpoint_is_written_costs_that_checkpoint_only(text, held_out, whole, tmp_path):
    folder, result = whole
    room = in_pages(folder / 'checkpoints' / '4') * 3 // 2
    place = tmp_path / 'disk'
    place.mkdir()
    mount = ['mount', '-t', 'tmpfs', '-o']
    if subprocess.run([*mount, f'size={room}', 'tmpfs', place], capture_output=True).returncode:
        pytest.skip('no file system can be mounted here')
    try:
        with pytest.raises(ResourceError, match='the disk is full: no room for checkpoint 8') as e:
            loop.train(MICRO, text, place / 'run', 0, held_out)
        assert e.value.exit_code == 5 and checkpoint.steps(place / 'run' / 'checkpoints') == [4]
        assert [p.name for p in (place / 'run' / 'checkpoints').iterdir() if p.is_dir()] == ['4']
        subprocess.run([*mount, f'remount,size={10 * room}', place], check=True)
        again = loop.train(MICRO, text, place / 'run', 0, held_out)
        assert again.parameters == result.parameters
        assert (place / 'run' / 'events.jsonl').read_bytes() == (folder / 'events.jsonl').read_bytes()
    finally:
        subprocess.run(['umount', '-l', place], check=True)


def test_a_log_on_a_full_disk_stops_the_run(text, tmp_path):
    (tmp_path / 'run').mkdir()
    (tmp_path / 'run' / 'timings.jsonl').symlink_to('/dev/full')
    with pytest.raises(OSError, match='No space left on device'):
        loop.train(MICRO, text, tmp_path / 'run')


def test_another_vocabulary_is_refused(text, tmp_path):
    other = rungs.changed(rungs.rung('desk-micro'), **SIZES | {'vocab': 1024})
    with pytest.raises(UsageError, match='has 1024 vocabulary entries; tiny has 512'):
        loop.train(other, text, tmp_path / 'run')


def test_every_layer_s_experts_are_trained(whole):
    _, result = whole
    fresh = step.initial_state(step.compiled(MICRO.recipe)[0], 0)
    names = checkpoint.names(fresh.params)
    for name, a, b in zip(
        names, loop.jax.tree.leaves(fresh.params), loop.jax.tree.leaves(result.state.params), strict=True
    ):
        moved = np.abs(np.asarray(a) - np.asarray(b))
        axes = tuple(range(1, moved.ndim)) if name.startswith('blocks.') else None
        assert (moved.max(axis=axes) > 0).all(), name


def test_a_log_that_lost_lines_is_refused_on_resume(text, held_out, tmp_path):
    loop.train(MICRO, text, tmp_path / 'run', 0, held_out, stop_after=5)
    log = tmp_path / 'run' / 'events.jsonl'
    log.write_text(''.join(log.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(IntegrityError, match='has 2 of the 5 steps before the checkpoint'):
        loop.train(MICRO, text, tmp_path / 'run', 0, held_out)


def test_a_router_bias_that_is_not_a_number_stops_the_run(text, tmp_path, monkeypatch):
    plain = loop.steps

    def spoiled(*args):
        for n, state, metrics, seconds in plain(*args):
            told = metrics.telemetry._replace(next_bias=metrics.telemetry.next_bias * np.float32(np.nan))
            yield n, state, metrics._replace(telemetry=told) if n == 3 else metrics, seconds

    monkeypatch.setattr(loop, 'steps', spoiled)
    with pytest.raises(NumericsError, match='step 3: the router bias is not finite'):
        loop.train(MICRO, text, tmp_path / 'run')


@pytest.mark.parametrize('line', ['{"loss": 1.0}', '7', '{"step": "1"}'])
def test_a_log_line_without_a_step_is_refused_by_its_number(tmp_path, line):
    path = tmp_path / 'events.jsonl'
    path.write_text('{"step": 1}\n' + line + '\n')
    with pytest.raises(IntegrityError, match='line 2 (has no step|is no event)'):
        events.cut(path, 1)
