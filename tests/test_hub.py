"""Push and pull with the real client against a hub on this machine that fails in every way a hub can."""

import json
import logging
import shutil

import pytest
from hub_server import TOKEN, serve
from ladderbook import record
from ladderbook.errors import IntegrityError, LockedError, ResourceError, UsageError
from ladderbook.files import lock, sha256_file
from ladderbook.serve import export, hub
from ladderbook.serve.folder import MANIFEST

REPO = 'some-lab/desk-micro'


@pytest.fixture(scope='module')
def made(tmp_path_factory):
    home = tmp_path_factory.mktemp('home')
    run = export.example(home)
    export.export(run, cache=home / 'cache')
    return run, home / 'cache'


@pytest.fixture
def server(tmp_path, monkeypatch):
    "A hub, and the real client pointed at it: plain uploads, no waiting between its tries, a cache of its own."
    import huggingface_hub.constants as constants
    import huggingface_hub.utils._http as client

    with serve() as found:
        monkeypatch.setenv('HF_ENDPOINT', found.url)
        monkeypatch.setenv('HF_TOKEN', TOKEN)
        monkeypatch.setattr(constants, 'HF_HUB_DISABLE_XET', True)
        monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path / 'hf'))
        monkeypatch.setattr(client.time, 'sleep', lambda seconds: None)
        yield found


@pytest.fixture
def copy(made, tmp_path):
    "A copy of the run and its export that may be damaged."
    target = tmp_path / 'runs' / made[0].name
    shutil.copytree(made[0], target, ignore=shutil.ignore_patterns('export-step*'))
    return target


def same(folder, run, name='export'):
    ours = sorted(p.name for p in (run / name).iterdir())
    assert sorted(p.name for p in folder.iterdir()) == sorted([*ours, 'record'])
    return all((folder / n).read_bytes() == (run / name / n).read_bytes() for n in ours)


def commits(server):
    return [path for method, path in server.seen if method == 'POST' and '/commit/' in path]


# --- there and back ---------------------------------------------------------------------------------------------------


def test_what_is_pushed_comes_back_verified_with_its_record(copy, server, tmp_path):
    run = copy
    for name in ('parity.json', 'harness.json'):
        (run / name).write_text('{}')
    done = []
    [commit] = hub.push(run, REPO, progress=lambda *a: done.append(a))
    assert done == [('main', 1, 1)] and commit.oid == server.repos[REPO]['branches']['main']
    assert set(server.files(REPO)) == {'.gitattributes', *(i.path for i in commit.items)}
    seen = []
    pulled = hub.pull(REPO, out=tmp_path / 'pulled', progress=lambda *a: seen.append(a))
    assert (pulled.commit, pulled.step) == (commit.oid, 40) and same(pulled.folder, run)
    assert seen[-1][1] == seen[-1][2] == commit.bytes
    assert {'parity.json', 'harness.json'} < {p.name for p in (pulled.folder / 'record').iterdir()}
    assert sha256_file(pulled.folder / 'record' / 'events.jsonl') == sha256_file(run / 'events.jsonl')
    spec, arrays = export.load(pulled.folder)
    assert all((a == b).all() for a, b in zip(arrays.values(), export.load(run / 'export')[1].values(), strict=True))
    assert sorted(p.name for p in tmp_path.iterdir() if 'pulled' in p.name) == ['pulled']


def test_by_branch_by_commit_and_twice(made, server, tmp_path):
    run, _ = made
    [first] = hub.push(run, REPO, 'step40')
    [second] = hub.push(run, REPO, 'step40')
    assert second.oid == first.oid and len(commits(server)) == 1  # nothing had changed
    assert hub.pull(REPO, 'step40', tmp_path / 'a').commit == first.oid
    assert hub.pull(REPO, first.oid, tmp_path / 'b').step == 40
    with pytest.raises(UsageError, match='a is there already'):
        hub.pull(REPO, 'step40', tmp_path / 'a')


def test_a_dry_run_asks_nothing(made, server):
    [commit] = hub.push(made[0], REPO, dry_run=True)
    assert commit.oid is None and commit.bytes == sum(i.source.stat().st_size for i in commit.items)
    assert server.seen == []


def test_all_steps_each_under_its_name(copy, made, server, tmp_path):
    found = hub.push(copy, REPO, all_steps=True, cache=made[1])
    assert [(c.revision, c.step) for c in found] == [('step20', 20), ('step40', 40)]
    assert export.verified_run(copy)[1] == 40  # the exports in its folder do no harm to the record
    for step in (20, 40):
        pulled = hub.pull(REPO, f'step{step}', tmp_path / str(step))
        assert pulled.step == step and same(pulled.folder, copy, f'export-step{step}')
    assert server.files(REPO, 'main').keys() == {'.gitattributes'}


def test_files_of_an_earlier_push_go_away(made, server, tmp_path):
    server.create(REPO)
    server.commit(REPO, 'main', {**server.files(REPO), 'pytorch_model.bin': b'\x80\x04.', 'record/old.json': b'{}'})
    hub.push(made[0], REPO)
    assert not {'pytorch_model.bin', 'record/old.json'} & set(server.files(REPO))
    assert '.gitattributes' in server.files(REPO)
    hub.pull(REPO, out=tmp_path / 'out')


# --- refused before anything is asked ---------------------------------------------------------------------------------


def test_no_export_or_a_damaged_one_is_not_pushed(copy, server):
    shard = copy / 'export' / 'model-layer-00001.safetensors'
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(IntegrityError, match=r'model-layer-00001\.safetensors: tensor model\.layers\.1\..* is not the'):
        hub.push(copy, REPO)
    (copy / 'export' / MANIFEST).unlink()
    with pytest.raises(UsageError, match='no finished export .* ladderbook export'):
        hub.push(copy, REPO)
    assert server.seen == []


def test_a_run_whose_record_changed_is_not_pushed(copy, server):
    (copy / 'metrics.json').write_text((copy / 'metrics.json').read_text().replace('6.0', '5.0'))
    with pytest.raises(IntegrityError, match=r'metrics\.json is missing or not'):
        hub.push(copy, REPO)
    assert server.seen == []


def test_an_export_of_another_checkpoint_is_not_pushed(copy, server):
    shutil.rmtree(copy / 'checkpoints' / '40')
    shutil.copytree(copy / 'checkpoints' / '20', copy / 'checkpoints' / '40')
    mark = json.loads((copy / 'checkpoints' / '20.json').read_text()) | {'step': 40}
    (copy / 'checkpoints' / '40.json').write_text(json.dumps(mark))
    record.write_manifest(copy)
    with pytest.raises(IntegrityError, match='its checkpoint is another'):
        hub.push(copy, REPO)


@pytest.mark.parametrize('repo, revision', [('no-slash', 'main'), ('a/b/c', 'main'), ('a/b', '../main'), ('a/b', '')])
def test_names_that_are_none(made, server, repo, revision):
    with pytest.raises(UsageError, match='is not a name'):
        hub.push(made[0], repo, revision or '-')
    with pytest.raises(UsageError, match='is not a name'):
        hub.pull(repo, revision)
    assert server.seen == []


# --- the hub fails ----------------------------------------------------------------------------------------------------


def test_a_wrong_token_is_told_and_never_shown(made, server, monkeypatch, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv('HF_TOKEN', wrong := 'hf_aTokenThatOpensNothing')
    with pytest.raises(UsageError, match=r'refuses access .*\(401\)') as e:
        hub.push(made[0], REPO)
    said = str(e.value) + caplog.text + ''.join(capfd.readouterr())
    assert wrong not in said and 'HF_TOKEN' in str(e.value) and e.value.exit_code == 2
    with pytest.raises(UsageError) as e:
        hub.push(made[0], REPO, token='hf_givenByHand')
    assert 'hf_givenByHand' not in str(e.value)


def test_a_token_in_what_the_hub_says_is_removed(made, server, monkeypatch):
    monkeypatch.setattr(hub, '_send', lambda api, c: (_ for _ in ()).throw(OSError(f'bad header: Bearer {TOKEN}')))
    with pytest.raises(ResourceError) as e:
        hub.push(made[0], REPO)
    assert TOKEN not in str(e.value) and 'removed' in str(e.value)


def failing(times, status, method, part):
    "A fault: the first `times` requests of `method` whose path has `part` are answered with `status`."
    left = [times]

    def fault(seen, path):
        if seen == method and part in path and left[0] > 0:
            left[0] -= 1
            return status
        return None

    return fault


@pytest.mark.parametrize('status', [429, 503, 'cut'])
def test_an_upload_that_fails_twice_is_tried_again(made, server, tmp_path, status):
    server.fault = failing(2, status, 'PUT', '/lfs/')
    hub.push(made[0], REPO)
    assert same(hub.pull(REPO, out=tmp_path / 'out').folder, made[0])


@pytest.mark.parametrize(
    'status, method, part, words',
    [
        (429, 'POST', '/commit/', r'asks to wait .*\(429\)'),
        (500, 'POST', '/preupload/', 'the hub failed'),
        ('cut', 'PUT', '/lfs/', 'the hub failed'),
        (403, 'POST', '/commit/', r'refuses access .*\(403\)'),
    ],
)
def test_a_push_that_breaks_leaves_the_branch_as_it_was_and_can_be_repeated(made, server, status, method, part, words):
    server.create(REPO)
    before = server.repos[REPO]['branches']['main']
    server.fault = failing(1000, status, method, part)
    with pytest.raises((ResourceError, UsageError), match=words):
        hub.push(made[0], REPO)
    assert server.repos[REPO]['branches']['main'] == before
    server.fault = lambda method, path: None
    [commit] = hub.push(made[0], REPO)
    assert server.repos[REPO]['branches']['main'] == commit.oid != before


def test_a_hub_that_stores_other_bytes_is_found_out(made, server):
    changed = []

    def store(oid, data):
        if changed:
            return data
        changed.append(oid)
        return data[:-1] + b'?'

    server.store = store
    with pytest.raises(IntegrityError, match='holds another .* than was pushed'):
        hub.push(made[0], REPO)
    assert changed


def test_a_hub_that_is_not_there(made, server, monkeypatch, tmp_path):
    monkeypatch.setenv('HF_ENDPOINT', 'http://127.0.0.1:9')
    for ask in (lambda: hub.push(made[0], REPO), lambda: hub.pull(REPO, out=tmp_path / 'out')):
        with pytest.raises(ResourceError, match='the hub failed'):
            ask()
    assert not (tmp_path / 'out').exists()


# --- pulls that are refused -------------------------------------------------------------------------------------------


@pytest.fixture
def pushed(made, server):
    hub.push(made[0], REPO)
    return server


def nothing_left(tmp_path):
    return not [p for p in tmp_path.iterdir() if p.name == 'out' or p.name.endswith('.pull')]


def test_a_file_changed_on_the_way_is_refused(pushed, tmp_path):
    name = 'model-layer-00000.safetensors'
    pushed.tamper = lambda path, data: data[:-4] + b'\0\0\0\0' if path == name else data
    with pytest.raises(IntegrityError, match=f'{name}: tensor model.layers.0'):
        hub.pull(REPO, out=tmp_path / 'out')
    assert nothing_left(tmp_path)


@pytest.mark.parametrize(
    'change, words',
    [
        ({'model-global.safetensors': b'x' * 50}, r'holds another model-global\.safetensors than its manifest names'),
        ({'pytorch_model.bin': b'\x80\x04.'}, r'holds pytorch_model\.bin, which its manifest does not name'),
        ({'code/run.py': b'import os'}, r'holds code/run\.py, which its manifest does not name'),
        ({'tokenizer.json': None}, r'lacks tokenizer\.json, which its manifest names'),
        ({'record/events.jsonl': b'{"step":1}\n'}, r'events\.jsonl of the pulled record is not the file'),
        ({MANIFEST: b'{"schema": "ladderbook.export", "version": 2}'}, 'version 2; this ladderbook reads'),
    ],
)
def test_a_repository_that_was_changed_is_refused(pushed, tmp_path, change, words):
    files = {k: v for k, v in {**pushed.files(REPO), **change}.items() if v is not None}
    pushed.commit(REPO, 'main', files)
    pushed.seen.clear()
    with pytest.raises(IntegrityError, match=words):
        hub.pull(REPO, out=tmp_path / 'out')
    assert nothing_left(tmp_path)
    assert not [path for _, path in pushed.seen if path.endswith(('.bin', '.py'))]


def test_another_steps_weights_under_a_steps_name_are_refused(pushed, tmp_path):
    pushed.repos[REPO]['branches']['step20'] = pushed.repos[REPO]['branches']['main']
    with pytest.raises(IntegrityError, match='holds step 40 under the name step20'):
        hub.pull(REPO, 'step20', tmp_path / 'out')
    assert nothing_left(tmp_path)


def test_what_is_not_there_or_not_an_export(pushed, tmp_path):
    pushed.create('some-lab/empty')
    for repo, revision, words in (
        ('some-lab/empty', 'main', 'is not an export: it has no'),
        ('some-lab/none', 'main', r'the hub has no some-lab/none .* \(404\)'),
        (REPO, 'step7', r'the hub has no .* of that revision'),
    ):
        with pytest.raises(UsageError, match=words):
            hub.pull(repo, revision, tmp_path / 'out')
    assert nothing_left(tmp_path)


def test_a_pull_that_was_interrupted_goes_on(pushed, made, tmp_path):
    pushed.fault = failing(1000, 500, 'GET', 'model-layer-00001')
    with pytest.raises(ResourceError, match='the hub failed'):
        hub.pull(REPO, out=tmp_path / 'out')
    assert not (tmp_path / 'out').exists() and (tmp_path / '.out.pull' / 'model-layer-00000.safetensors').exists()
    pushed.fault = lambda method, path: None
    pushed.seen.clear()
    assert same(hub.pull(REPO, out=tmp_path / 'out').folder, made[0])
    fetched = [path.rsplit('/', 1)[1] for method, path in pushed.seen if method == 'GET' and '/resolve/' in path]
    assert 'model-layer-00001.safetensors' in fetched and 'model-layer-00000.safetensors' not in fetched
    assert nothing_left(tmp_path / 'x') if (tmp_path / 'x').exists() else not (tmp_path / '.out.pull').exists()


def test_a_full_disk_and_a_pull_at_work(pushed, tmp_path, monkeypatch):
    with lock(tmp_path / '.out.lock', 'x'), pytest.raises(LockedError, match='pull into .*out'):
        hub.pull(REPO, out=tmp_path / 'out')
    monkeypatch.setattr('ladderbook.machine.free_disk', lambda folder: 1000)
    with pytest.raises(ResourceError, match='needs .* of disk'):
        hub.pull(REPO, out=tmp_path / 'out')


def test_a_pull_that_failed_leaves_no_folder_and_no_lock(pushed, tmp_path):
    there = sorted(tmp_path.rglob('*'))
    with pytest.raises(UsageError, match='404'):
        hub.pull('org/absent', out=tmp_path / 'new' / 'deep' / 'out')
    with pytest.raises(UsageError, match='404'):
        hub.pull('org/absent', out=tmp_path / 'out')
    assert not (tmp_path / 'new').exists() and not list(tmp_path.glob('.out*'))
    assert sorted(tmp_path.rglob('*')) == there
