"""The command as a script sees it: exit codes, one line on standard error, JSON, and nothing heavy imported."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from ladderbook import cli, record
from test_house import copy_of_the_clone

CHANGES = 'layers:2 experts:8 sequence:64 window:32 batch:4 vocab:512 tokens:3072'
LONGER = CHANGES.replace('tokens:3072', 'tokens:1e8')
MICRO = ['desk-micro', '--corpus', 'tiny', '--set', f'changes={CHANGES}', '--set', 'threads=1']


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Runs and cache of the settings, moved to an empty folder."""
    monkeypatch.setenv('LADDERBOOK_PATHS_RUNS', str(tmp_path / 'runs'))
    monkeypatch.setenv('LADDERBOOK_PATHS_CACHE', str(tmp_path / 'cache'))
    return tmp_path


def run(capsys, *argv):
    code = cli.main([str(a) for a in argv])
    seen = capsys.readouterr()
    return code, seen.out, seen.err


def a_record(folder: Path, losses, macro, seed=0, **identity) -> Path:
    record.write_run(
        folder,
        {'rung': 'r', 'seed': seed, **identity},
        record.ended(record.observe(record.stamp()), 'finished', 0, 1.0),
    )
    lines = [{'step': n + 1, 'loss': x} for n, x in enumerate(losses)] + [
        {'step': len(losses), 'eval': {'macro': macro}}
    ]
    (folder / 'events.jsonl').write_text(''.join(json.dumps(e) + '\n' for e in lines))
    record.write_manifest(folder)
    return folder


@pytest.mark.parametrize(
    'argv, code, words',
    [
        (['fly'], 2, 'invalid choice'),
        (['plan', 'desk64'], 2, 'desk-64'),
        (['plan', 'desk-64', '--changes', 'widnow=3'], 2, 'window'),
        (['replay', 'desk-micro', '--set', 'sed=1'], 2, 'seed'),
        (['replay', 'desk-micro', '--set', 'seed'], 2, 'name=value'),
        (['replay', 'desk-micro', '--seed', 'x'], 2, 'expected int'),
        (['replay', 'desk-micro', '--seed', '1', '--set', 'seed=1'], 2, 'twice'),
        (['replay', 'desk-micro', '--set', 'folder=/tmp/x'], 2, 'folder'),
        (['replay', 'desk-micro', '--runner', 'docker'], 2, 'known: host'),
        (['replay', 'desk-micro', '--timeout', '0'], 2, 'timeout'),
        (['replay', 'hero'], 5, 'accelerators'),
        (['replay', 'desk-micro'], 5, 'ladderbook data build'),
        (['data', 'verify'], 5, 'ladderbook data build'),
        (['data', 'build', '--corpus', 'desk-v9'], 2, 'desk-v0'),
        (['data'], 2, 'required'),
        (['compare', 'x', 'y'], 2, 'names no run'),
        (['compare', 'x', 'y', '--noise', '-1'], 2, 'noise'),
        (['compare', 'x', 'y', '--noise', 'nan'], 2, 'noise'),
        (['compare', '', 'y'], 2, 'empty value'),
        (['compare', 'x' * 5000, 'y'], 2, '5000 characters'),
        (['plan', ''], 2, 'empty value'),
        (['plan', 'desk-64', '--changes', ''], 2, 'empty value'),
        (['plan', 'desk-64', '--changes', 'layers=9999999999999'], 2, 'expected at most 1,024'),
        (['plan', 'desk-64', '--changes', 'tokens=1e300'], 2, 'tokens is 1e+300; expected at most'),
        (['plan', 'desk-64', '--changes', f'tokens={"9" * 5000}'], 2, '5007 characters'),
        (['plan', 'desk-64', '--changes', 'batch=²'], 2, 'batch'),
        (['replay', ''], 2, 'empty value'),
        (['replay', 'desk-micro', '--runner', ''], 2, 'empty value'),
        (['replay', 'desk-micro', '--corpus', ''], 2, 'empty value'),
        (['replay', 'desk-micro', '--seed', '²'], 2, 'expected int'),
        (['replay', 'desk-micro', '--timeout', '9' * 5000], 2, '18 digits'),
        (['replay', 'desk-micro', '--set', 'experts=bogus'], 2, 'one of dropless, capacity'),
        (['replay', 'desk-micro', '--corpus', 'tiny'], 2, 'expected 512, the vocabulary of corpus tiny'),
        (['replay', *MICRO, '--set', 'stop_after=-1'], 2, 'stop_after'),
        (['data', 'rows', '--run', '', '--step', '1'], 2, 'empty value'),
        (['data', 'rows', '--rung', '', '--step', '1'], 2, 'empty value'),
        (['data', 'rows', '--rung', 'hero', '--step', '1'], 2, 'rung hero has no rows'),
        (['data', 'rows', '--rung', 'hero', '--corpus', 'tiny', '--step', '1'], 2, 'rung hero has no rows'),
        (['data', 'rows', '--run', 'x', '--rung', 'desk-64', '--step', '1'], 2, '--rung does not go with --run'),
        (['data', 'rows', '--rung', 'desk-micro', '--step', '²'], 2, 'whole number'),
        (['data', 'build', '--corpus', 'tiny', '--source-dir', ''], 2, 'empty value'),
    ],
)
def test_bad_input_is_one_line_and_a_code(capsys, elsewhere, argv, code, words):
    found, out, err = run(capsys, *argv)
    assert (found, out) == (code, '')
    assert err.startswith('ladderbook: ') and err.count('\n') == 1 and words in err and 'Traceback' not in err


@pytest.mark.parametrize(
    'key, value, words',
    [
        ('REPLAY_SEED', '²', 'whole number'),
        ('REPLAY_SEED', '9' * 5000, 'at most ten digits'),
        ('PATHS_CACHE', '~nobody-of-that-name/cache', 'no such home folder'),
        ('REPLAY_TIMEOUT', '0', 'timeout is 0'),
        ('REPLAY_RUNG', 'desk-46', 'desk-64'),
        ('REPLAY_RUNNER', 'moon', 'known: host'),
    ],
)
def test_a_wrong_setting_is_refused_by_replay_and_shown_by_the_doctor(
    capsys, elsewhere, monkeypatch, key, value, words
):
    monkeypatch.setenv(f'LADDERBOOK_{key}', value)
    code, out, err = run(capsys, 'replay', *([] if key == 'REPLAY_RUNG' else ['desk-micro']))
    assert (code, out) == (2, '') and words in err and err.count('\n') == 1 and len(err) < 300
    code, out, err = run(capsys, 'doctor')
    shown = [line for line in (out + err).splitlines() if words in line]
    assert code == 2 and len(shown) == 1
    assert shown[0].startswith('!!  settings') or shown[0].startswith('ladderbook: settings')


def test_the_module_is_the_command():
    command = [sys.executable, '-m', 'ladderbook.cli']
    done = subprocess.run([*command, '--version'], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()[0]) == (0, 'ladderbook')
    done = subprocess.run([*command, 'plan', 'desk64'], capture_output=True, text=True)
    assert done.returncode == 2 and 'desk-64' in done.stderr and done.stderr.count('\n') == 1


def test_a_plan_separates_parts_from_sums_and_states_what_the_changed_rung_takes(capsys):
    _, out, _ = run(capsys, 'plan', 'desk-64')
    parts, sums = (out.split(f'{title}\n')[1].split('\n\n')[0] for title in ('which add up', 'counted otherwise'))
    rows = {r.split()[-2]: int(r.split()[-1].replace(',', '')) for r in parts.splitlines()}
    assert rows.pop('total') == sum(rows.values()) == 1_884_800 and len(rows) == 13
    assert '180,224' in sums and '180,224' not in parts
    _, plain, _ = run(capsys, 'plan', 'desk-64', '--json')
    _, changed, _ = run(capsys, 'plan', 'desk-64', '--changes', 'tokens=1e8 experts=4096', '--json')
    before, after = (json.loads(x)['needs'] for x in (plain, changed))
    assert before['minutes'] == 1.2 and after['minutes'] > 100
    assert after['memory'] > 1.5 * before['memory'] and after['disk'] > before['disk']


def test_errors_are_json_when_json_is_asked_for(capsys, elsewhere):
    code, out, err = run(capsys, 'plan', 'desk64', '--json')
    assert json.loads(out) == {'error': err.removeprefix('ladderbook: ').strip(), 'exit_code': code}


def test_help_and_plan_import_nothing_heavy():
    heavy = ('jax', 'numpy', 'papermill', 'tokenizers', 'matplotlib')
    code = (
        'import sys; from ladderbook.cli import main; main(["plan", "desk-64"]); '
        f'print([m for m in {heavy} if m in sys.modules], file=sys.stderr)'
    )
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr.strip() == '[]', done.stderr
    assert '1,884,800' in done.stdout  # parameters of desk-64


def test_every_verb_answers_as_json(capsys, elsewhere):
    code, out, _ = run(capsys, 'plan', 'hero', '--json')
    assert code == 0 and json.loads(out)['parameters']['total'] == 535_477_106_688
    code, out, _ = run(capsys, 'doctor', '--json')
    assert code == 5 and {f['name'] for f in json.loads(out) if f['ok'] is False} == {'corpus'}
    code, out, _ = run(capsys, 'data', 'build', '--corpus', 'tiny', '--json')
    built = json.loads(out)
    assert code == 0 and built['name'] == 'tiny' and built['train_tokens'] > 10_000
    code, out, _ = run(capsys, 'data', 'verify', '--corpus', 'tiny', '--json')
    assert code == 0 and json.loads(out) == built
    code, out, _ = run(capsys, 'data', 'report', '--corpus', 'tiny', '--json')
    assert code == 0 and json.loads(out)['digest'] == built['digest']
    code, out, _ = run(capsys, 'data', 'rows', '--corpus', 'tiny', '--rung', 'desk-micro', '--step', '3', '--json')
    rows = json.loads(out)
    assert code == 0 and len(rows['rows']) == 8 and rows['rows'][0]['documents'][0]['text']
    code, out, _ = run(capsys, 'data', 'rows', '--corpus', 'tiny', '--rung', 'desk-micro', '--step', '3')
    assert rows['sha256'][:12] in out
    code, _, err = run(capsys, 'data', 'rows', '--corpus', 'tiny', '--rung', 'desk-micro', '--step', '0')
    assert code == 2 and 'steps 1 to 40' in err
    (Path(built['folder']) / 'notes.txt').write_text('not of the corpus')
    code, _, err = run(capsys, 'data', 'verify', '--corpus', 'tiny')
    assert code == 3 and 'notes.txt' in err and err.count('\n') == 1


def test_a_damaged_corpus_stops_with_3(capsys, elsewhere):
    run(capsys, 'data', 'build', '--corpus', 'tiny')
    path = elsewhere / 'cache' / 'corpora' / 'tiny' / 'train.bin'
    path.write_bytes(path.read_bytes()[:-2])
    for argv in (['data', 'verify', '--corpus', 'tiny'], ['replay', *MICRO]):
        code, _, err = run(capsys, *argv)
        assert code == 3 and 'train.bin' in err


def test_compare_verdicts(capsys, elsewhere):
    runs = elsewhere / 'runs'
    a_record(runs / 'r-0-aaaa', [8.0, 7.0], 6.9)
    a_record(runs / 'r-0-bbbb', [8.0, 7.0], 6.9)
    a_record(runs / 'r-1-cccc', [8.0, 7.25], 7.0, seed=1)
    code, out, _ = run(capsys, 'compare', 'r-0-a', 'r-0-b')
    assert code == 0 and out.splitlines()[1].startswith('equal to the bit')
    code, out, _ = run(capsys, 'compare', 'r-0-a', runs / 'r-1-cccc', '--noise', '0.2')
    first, second, *rest = out.splitlines()
    assert first == 'A is r-0-aaaa (rung r, seed 0), B is r-1-cccc (rung r, seed 1); differences are B minus A'
    assert code == 0 and second.startswith('within the stated noise of 0.2 nats (final loss +0.1 nats, B minus A)')
    assert rest == ['identity seed: 0 in A, 1 in B']
    code, out, _ = run(capsys, 'compare', 'r-0-a', 'r-1', '--json')
    found = json.loads(out)
    assert code == 3 and (found['verdict'], found['step'], found['field']) == ('different', 2, 'loss')
    assert found['values'] == [7.0, 7.25] and abs(found['gap'] - 0.1) < 1e-12
    code, _, err = run(capsys, 'compare', 'r-0', 'r-1')
    assert code == 2 and '2 runs' in err
    (runs / 'r-1-cccc' / 'events.jsonl').write_text('{"loss": 8.0}\n')
    record.write_manifest(runs / 'r-1-cccc')
    code, _, err = run(capsys, 'compare', 'r-0-a', 'r-1')
    assert code == 3 and 'events.jsonl line 1 lacks the key step' in err and err.count('\n') == 1
    (runs / 'r-0-bbbb' / 'events.jsonl').write_text('{"step": 1}\n')
    code, _, err = run(capsys, 'compare', 'r-0-a', 'r-0-b')
    assert code == 3 and 'events.jsonl' in err


def test_departures_are_compared_by_name(elsewhere):
    from ladderbook.recipe import rungs

    folders = []
    for n, changes in enumerate(({'batch': 4, 'top_k': 3}, {'top_k': 3, 'adam_lr': 0.001, 'batch': 4})):
        recipe = rungs.changed(rungs.rung('desk-micro'), **changes).recipe.to_dict()
        folders.append(a_record(elsewhere / f'r-{n}', [8.0], 7.9, recipe=recipe))
    found = record.compare(*folders).identity
    away = {k: v for k, v in found.items() if k.startswith('recipe.departures')}
    assert set(away) == {'recipe.departures.adam_lr.rule', 'recipe.departures.adam_lr.value'}
    assert away['recipe.departures.adam_lr.value'] == (None, 0.001)


def test_rows_of_a_run_need_its_corpus_and_its_shape(capsys, elsewhere):
    run(capsys, 'data', 'build', '--corpus', 'tiny')
    recipe = {'spec': {'sequence': 64}, 'batch': 4, 'steps': 12}
    a_record(elsewhere / 'runs' / 'other', [8.0], 7.9, recipe=recipe, corpus={'name': 'tiny', 'digest': '0' * 64})
    code, _, err = run(capsys, 'data', 'rows', '--run', 'other', '--step', '1')
    assert code == 3 and 'not the one that other saw' in err
    a_record(
        elsewhere / 'runs' / 'bare', [8.0], 7.9, recipe=recipe | {'batch': '4'}, corpus={'name': 'tiny', 'digest': ''}
    )
    code, _, err = run(capsys, 'data', 'rows', '--run', 'bare', '--step', '1')
    assert code == 3 and "run.json: identity.recipe.batch is '4'; expected int" in err


def test_costly_or_destructive_needs_yes(capsys, elsewhere):
    code, out, err = run(capsys, 'replay', 'desk-micro', '--corpus', 'tiny', '--set', f'changes={LONGER}')
    assert (code, out) == (2, '') and 'about 22.7 min' in err
    assert err.splitlines()[-1] == 'ladderbook: desk-micro takes longer than 5 minutes; pass --yes to go on'
    assert not (elsewhere / 'runs').exists()
    with pytest.raises(Exception, match='pass --yes') as e:
        cli.agree('this removes a record', False)
    assert e.value.exit_code == 2
    assert cli.agree('this removes a record', True) is None


def test_a_micro_rung_replays_resumes_and_repeats(capsys, elsewhere):
    """One real run, as a user would start it: stopped half way, continued, shown again, compared with another seed."""
    code, out, err = run(capsys, 'replay', *MICRO, '--set', 'stop_after=6')
    assert code == 0 and 'goes on      after step 6, with' in out, err
    code, out, err = run(capsys, 'replay', *MICRO, '--json')
    assert code == 0 and 'goes on where it stopped' in err, err
    whole = json.loads(out)
    assert whole['status'] == 'finished' and whole['step'] == 12 and whole['tokens_per_second'] > 0
    assert set(whole['metrics']['evaluation']['domains']) and whole['metrics']['loss'] < 7
    first = Path(whole['folder'])
    files = record.verify(first)['files']
    assert {'run.json', 'events.jsonl', 'timings.jsonl', 'rung.ipynb', 'metrics.json'} <= set(files)
    who = record.read_run(first)['identity']
    assert who['threads'] == 1 and who['recipe']['batch'] == 4 and who['environment']['JAX_PLATFORMS'] == 'cpu'
    code, out, err = run(capsys, 'replay', *MICRO)
    assert code == 0 and 'already there' in err and 'macro' in out and str(first) in out
    counts = {d: v['tokens'] for d, v in whole['metrics']['evaluation']['domains'].items()}
    assert all(f'{d} {n:,}' in out.split('evaluated    tokens: ')[1] for d, n in counts.items()) and len(counts) == 5
    code, out, _ = run(capsys, 'data', 'rows', '--run', first.name, '--step', '12')
    assert code == 0 and '4 rows of 64' in out
    copy = first.rename(first.parent / 'stopped-and-resumed')
    assert run(capsys, 'replay', *MICRO)[0] == 0
    code, out, _ = run(capsys, 'compare', copy.name, first.name)
    assert code == 0 and out.splitlines()[1].startswith('equal to the bit'), out
    same = [record.verify(f)['digests']['deterministic'] for f in (copy, first)]
    assert same[0] == same[1]


@pytest.fixture
def installed(tmp_path):
    """The wheel in an environment of its own, which takes every library from this one; `run(*argv)` in an empty folder."""
    source = copy_of_the_clone(tmp_path / 'source')
    build = [sys.executable, '-m', 'build', '--wheel', '--no-isolation', '--outdir', tmp_path / 'dist', source]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = (tmp_path / 'dist').glob('*.whl')
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', tmp_path / 'env'], check=True)
    (site,) = (tmp_path / 'env' / 'lib').glob('python3*/site-packages')
    zipfile.ZipFile(wheel).extractall(site)
    (site / 'libraries.pth').write_text(f'{Path(pytest.__file__).parent.parent}\n')
    (tmp_path / 'empty').mkdir()
    env = {k: v for k, v in os.environ.items() if not k.startswith(('LADDERBOOK_', 'PYTHON'))}

    def run(*argv):
        code = 'import sys; from ladderbook.cli import main; sys.exit(main())'
        python = [tmp_path / 'env' / 'bin' / 'python', '-c', code]
        return subprocess.run([*python, *argv], cwd=tmp_path / 'empty', env=env, capture_output=True, text=True)

    return site, tmp_path / 'empty', run


@pytest.mark.end_to_end
def test_wheel_plans_and_replays_from_an_empty_folder(installed):
    """Installed without a clone: the wheel carries the notebook, the locks and the tiny text."""
    site, empty, command = installed
    assert '1,884,800' in command('plan', 'desk-64').stdout
    refused = command('replay', 'desk-micro')
    assert refused.returncode == 5 and str(empty) in refused.stderr, refused.stderr
    done = command('replay', *MICRO, '--json')
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    folder = Path(value['folder'])
    assert folder.parent == empty / 'artifacts' / 'runs' and value['status'] == 'finished'
    assert record.verify(folder)
    executed = json.loads((folder / 'rung.ipynb').read_text())['metadata']['papermill']
    assert Path(executed['input_path']).is_relative_to(site / 'ladderbook' / '_bundle')
    code = {p.relative_to(site / 'ladderbook').as_posix() for p in (site / 'ladderbook').rglob('*.py')}
    assert 'cli.py' in code and not (empty / 'ladderbook').exists()


def test_a_place_that_cannot_be_written_is_one_line_and_exit_5(tmp_path, monkeypatch, capsys):
    from ladderbook import cli

    (tmp_path / 'corpora').write_text('a file where a folder belongs')
    monkeypatch.setenv('LADDERBOOK_PATHS_CACHE', str(tmp_path))
    assert cli.main(['data', 'build', '--corpus', 'tiny']) == 5
    assert capsys.readouterr().err.splitlines()[-1].startswith('ladderbook: ')


@pytest.mark.parametrize('rung, code', [('desk-64', 5), ('desk-99', 2)])
def test_an_answer_that_cannot_be_written_ends_in_a_sentence(rung, code):
    command = [sys.executable, '-m', 'ladderbook.cli', 'plan', rung, '--json']
    with open('/dev/full', 'w') as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == code and done.stderr.startswith('ladderbook: ') and len(done.stderr.splitlines()) == 1
