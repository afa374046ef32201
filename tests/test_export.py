"""Exports as a whole: memory, kills, every changed byte, and refusals by name."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from ladderbook import record, serving
from ladderbook.data.tokens import load_tokenizer
from ladderbook.errors import IntegrityError, LockedError, ResourceError, UsageError
from ladderbook.files import digest, lock, read_json, write_json
from ladderbook.recipe import rungs
from ladderbook.recipe.spec import HERO, parameters
from ladderbook.serve import card, export, folder, layout
from ladderbook.train import checkpoint, step


@pytest.fixture(scope='module')
def made(tmp_path_factory):
    "A run made by hand, its cache and its float32 export."
    home = tmp_path_factory.mktemp('home')
    run = export.example(home)
    return run, home / 'cache', export.export(run, cache=home / 'cache')


@pytest.fixture
def copy(made, tmp_path):
    "A copy of that run (under its own name) that may be damaged."
    run, cache, _ = made
    target = tmp_path / 'runs' / run.name
    shutil.copytree(run, target, ignore=shutil.ignore_patterns('export*'))
    return target, cache


def same(a, b):
    names = sorted(p.name for p in a.iterdir())
    assert names == sorted(p.name for p in b.iterdir())
    return all((a / n).read_bytes() == (b / n).read_bytes() for n in names)


# --- memory and kills -------------------------------------------------------------------------------------------------

LIMITED = """
import json, resource, sys
from pathlib import Path
from ladderbook.serve import export


def status():
    lines = [x.split(':', 1) for x in open('/proc/self/status')]
    return {k: int(v.split()[0]) << 10 for k, v in lines if 'kB' in v}


small, large, cache, out, allowance = sys.argv[1:]
export.export(Path(small), Path(out) / 'small', cache=Path(cache))  # every thread and library is there now
resource.setrlimit(resource.RLIMIT_AS, (status()['VmSize'] + int(allowance),) * 2)
open('/proc/self/clear_refs', 'w').write('5')  # the peak is counted from here
before = status()['VmHWM']
made = export.export(Path(large), Path(out) / 'large', cache=Path(cache), dtype='bfloat16')
grown = status()['VmHWM'] - before
try:
    whole = bytearray(4 * made.parameters)
    held = True
except MemoryError:
    held = False
print(json.dumps({'grown': grown, 'parameters': made.parameters, 'held': held}))
"""


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='the limit is set by what /proc says')
def test_a_model_larger_than_the_memory_allowed_is_exported(tmp_path):
    spec = replace(
        rungs.rung('desk-micro').recipe.spec,
        layers=20, experts=32, latent_width=128, expert_width=128, vocab=512, sequence=64, window=32,
    )  # fmt: skip
    layer = 4 * parameters(spec)['per_layer']
    allowance = 48 << 20
    assert 20 * layer > 2.5 * allowance > 7 * layer
    small = export.example(tmp_path, steps=(40,))
    large = export.example(tmp_path, spec=spec, seed=1, steps=(40,))
    arguments = [small, large, tmp_path / 'cache', tmp_path, allowance]
    done = subprocess.run(
        [sys.executable, '-c', LIMITED, *map(str, arguments)],
        env={**os.environ, 'MALLOC_ARENA_MAX': '1'}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found['parameters'] == parameters(spec)['total']
    assert not found['held']  # the limit holds: the model itself does not fit
    assert found['grown'] < layer + (16 << 20)
    assert export.verify(tmp_path / 'large')['request']['dtype'] == 'bfloat16'


KILLED = """
import os, signal, sys
from pathlib import Path
from ladderbook.serve import export, folder

run, cache, out, mode = sys.argv[1:]
if mode == 'between':
    def die(file, done, total):
        if file.startswith('model-layer-00000'):
            os.kill(os.getpid(), signal.SIGKILL)
else:
    die, plain, count = None, folder.stored, iter(range(60))
    def stored(*a):
        if next(count, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*a)
    folder.stored = stored
export.export(Path(run), Path(out), cache=Path(cache), progress=die)
"""


@pytest.mark.parametrize('mode, kept', [('between', 2), ('within', 2)])
def test_a_killed_export_goes_on_and_ends_with_the_same_bytes(made, tmp_path, mode, kept):
    run, cache, whole = made
    done = subprocess.run([sys.executable, '-c', KILLED, str(run), str(cache), str(tmp_path / 'out'), mode])
    assert done.returncode == -signal.SIGKILL
    with pytest.raises(UsageError, match='interrupted; export again'):
        export.verify(tmp_path / 'out')
    again = export.export(run, tmp_path / 'out', cache=cache)
    assert again.kept == kept and same(again.folder, whole.folder)


def test_a_run_in_use_is_not_exported(made, tmp_path):
    run, cache, _ = made
    with lock(run / 'run.lock', 'run'), pytest.raises(LockedError, match=run.name):
        export.export(run, tmp_path / 'out', cache=cache)


# --- what is exported -------------------------------------------------------------------------------------------------


def test_the_training_loops_own_state_comes_back_to_the_bit(copy, tmp_path):
    target, cache = copy
    rung = rungs.changed(rungs.rung('desk-micro'), vocab=512, experts=8, sequence=64, window=32, tokens=40_960)
    program = step.program(rung.recipe)
    shapes, rng = jax.eval_shape(lambda: step.initial_state(program, 3)), np.random.default_rng(3)
    state = jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(x.dtype), shapes)
    checkpoint.save(target / 'checkpoints', 60, state, target.name)
    record.write_manifest(target)
    found = export.export(target, tmp_path / 'out', cache=cache)
    assert found.step == 60
    model = export.state(found.folder)
    assert checkpoint.tree_digest(nnx.state(model, nnx.Param)) == checkpoint.tree_digest(state.params)
    bias = checkpoint.flat(state.bias)
    assert np.array_equal(model.blocks.router_bias[...], bias['blocks.router_bias'])


def test_every_step_kept_can_be_exported_and_says_its_own_loss(made, tmp_path):
    run, cache, newest = made
    early = export.export(run, tmp_path / 'early', cache=cache, step=20)
    assert (early.step, newest.step) == (20, 40) and early.digest != newest.digest
    assert (
        '5.8000' in (early.folder / 'README.md').read_text() and '5.6000' in (newest.folder / 'README.md').read_text()
    )
    for name in ('tokenizer.json', 'config.json', 'ATTRIBUTION.md'):
        assert (early.folder / name).read_bytes() == (newest.folder / name).read_bytes()


def test_the_record_stays_verified_beside_its_export(copy):
    target, cache = copy
    export.export(target, cache=cache)
    write_json(target / 'parity.json', {'fp32': {}}, 'ladderbook.parity')
    assert export.verified_run(target)[1] == 40  # and can be exported again, elsewhere


def test_fresh_removes_an_export_and_nothing_else(made, tmp_path):
    run, cache, whole = made
    out = shutil.copytree(whole.folder, tmp_path / 'out')
    (out / folder.GOLDEN).write_text('{}')
    assert export.export(run, out, cache=cache, fresh=True).digest == whole.digest
    assert same(out, whole.folder)  # golden answers of the old one went with it
    (out / 'notes.txt').write_text('mine')
    with pytest.raises(UsageError, match=r'also holds notes\.txt'):
        export.export(run, out, cache=cache, fresh=True)
    (out / 'notes.txt').unlink()
    assert same(out, whole.folder)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_bfloat16_is_rounded_once_to_nearest_even(seed):
    bits = np.random.default_rng(seed).integers(0, 2**32, 64, np.uint32)
    x = bits.view(np.float32)
    x = np.where(np.isfinite(x) & (np.abs(x) < 3e38), x, np.float32(1))
    t = layout.Tensor('t', (64,), 'leaf', None, None, 'as is', 'model')
    stored = folder.stored(x, t, 'bfloat16')
    b = x.view(np.uint32).astype(np.uint64)
    slow = ((b + 0x7FFF + ((b >> 16) & 1)) >> 16).astype(np.uint16)  # the rule written out in integers
    assert np.array_equal(stored, slow)


def test_the_tokenizer_reads_as_it_was_trained(made):
    _, cache, found = made
    manifest = export.verify(found.folder)
    ours = load_tokenizer(cache / 'corpora' / 'tiny' / 'tokenizer.json')
    assert (found.folder / 'tokenizer.json').read_bytes() == (
        cache / 'corpora' / 'tiny' / 'tokenizer.json'
    ).read_bytes()
    assert load_tokenizer(found.folder / 'tokenizer.json').encode(card.SAMPLE).ids == manifest['tokenizer']['ids']
    assert ours.decode(manifest['tokenizer']['ids'], skip_special_tokens=False) == manifest['tokenizer']['text']


TRANSFORMERS = """
import json, sys
from transformers import AutoTokenizer, PreTrainedTokenizerFast

folder = sys.argv[1]
manifest = json.load(open(folder + '/ladderbook_export.json'))
for kind in (AutoTokenizer, PreTrainedTokenizerFast):
    t = kind.from_pretrained(folder)
    assert t.encode(manifest['tokenizer']['text']) == manifest['tokenizer']['ids'], (kind, t)
    assert t.decode(manifest['tokenizer']['ids']) == manifest['tokenizer']['text']
    assert (t.eos_token_id, t.bos_token_id, t.pad_token_id, t.unk_token_id) == (0, None, None, None)
    assert len(t) == 512 and t.model_max_length == 64 and t.chat_template is None
"""


def test_transformers_reads_the_same_ids(made, serving):
    environ = {**os.environ, 'HF_HUB_OFFLINE': '1'}
    done = subprocess.run(
        [serving, '-c', TRANSFORMERS, str(made[2].folder)], capture_output=True, text=True, env=environ
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_card_says_licence_sources_losses_and_what_is_not_known(made):
    from huggingface_hub import ModelCard

    run, cache, found = made
    text = (found.folder / 'README.md').read_text()
    data = ModelCard(text).data.to_dict()
    assert data['license'] == 'cc-by-4.0' and data['library_name'] == 'transformers'
    said = data['ladderbook']
    assert said['forecast'] == 'none registered' and said['rung'] == 'desk-micro' and said['loss']['macro'] == 5.6
    assert set(said['benchmarks']) == {'cloze', 'continuation', *export.BENCHMARKS}
    assert all('not decontaminated' in said['benchmarks'][b] for b in export.BENCHMARKS)
    for name, what in said['benchmarks'].items():
        assert f'- {name}: {what}' in text
    again = next(line for line in text.splitlines() if line.startswith('ladderbook replay'))
    assert again == 'ladderbook replay desk-micro --seed 0 --set threads=2 --set corpus=tiny --yes'
    for private in (str(run.parent), str(cache)):
        assert private not in text


# --- every changed byte -----------------------------------------------------------------------------------------------


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_any_byte_changed_anywhere_is_refused(made, tmp_path_factory, data):
    source = made[2].folder
    name = data.draw(st.sampled_from(sorted(p.name for p in source.iterdir())))
    raw = bytearray((source / name).read_bytes())
    at, flip = data.draw(st.integers(0, len(raw) - 1)), data.draw(st.integers(1, 255))
    raw[at] ^= flip
    bad = tmp_path_factory.mktemp('bad')
    for p in source.iterdir():
        (bad / p.name).symlink_to(p)
    (bad / name).unlink()
    (bad / name).write_bytes(raw)
    try:
        export.verify(bad)
    except IntegrityError as e:
        assert str(bad) in str(e)
    else:  # only white space of the manifest may differ: nothing hashes the manifest itself
        assert name == folder.MANIFEST
        assert json.loads(raw) == json.loads((source / name).read_bytes())


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_shard_cut_anywhere_is_refused_by_name(made, tmp_path_factory, data):
    source = made[2].folder
    name = data.draw(st.sampled_from(sorted(p.name for p in source.glob('*.safetensors'))))
    raw = (source / name).read_bytes()
    bad = tmp_path_factory.mktemp('cut') / name
    bad.write_bytes(raw[: data.draw(st.integers(0, len(raw) - 1))])
    with pytest.raises(IntegrityError, match=name):
        folder.header(bad)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_no_header_crashes_the_reader(tmp_path_factory, text):
    path = tmp_path_factory.mktemp('header') / 'x.safetensors'
    for body in (text, len(text).to_bytes(8, 'little') + text):
        path.write_bytes(body)
        with pytest.raises(IntegrityError, match=r'x\.safetensors'):
            folder.header(path)


# --- runs that are not exported ---------------------------------------------------------------------------------------


def refused(kind, words, target, cache, tmp_path):
    with pytest.raises(kind, match=words) as e:
        export.export(target, tmp_path / 'out', cache=cache)
    assert not (tmp_path / 'out' / folder.MANIFEST).exists()
    return e.value


def resaved(target, change):
    "The newest checkpoint with its arrays changed, properly saved again."
    spec = record.read_run(target)['identity']['recipe']['spec']
    read = export.reader(target / 'checkpoints', 40, export.from_dict(spec))
    arrays = {}
    for path in export.table(export.from_dict(spec)):
        layers = range(spec['layers']) if path.startswith('blocks.') else [None]
        found = np.stack([read(path, i) for i in layers])
        arrays[export._name(path) + '.value'] = found if path.startswith('blocks.') else found[0]
    checkpoint.save(target / 'checkpoints', 40, change(arrays), target.name)
    record.write_manifest(target)


def without(arrays):
    return {k: v for k, v in arrays.items() if 'moe.router' not in k}


def with_nan(arrays):
    arrays['params.blocks.moe.expert_up.value'][1, 3, 2, 1] = np.nan
    return arrays


@pytest.mark.parametrize(
    'change, words',
    [
        (without, r'params\.blocks\.moe\.router is missing from checkpoint 40'),
        (lambda a: a | {'params.blocks.moe.more': np.ones(2)}, r'params\.blocks\.moe\.more is unknown'),
        (lambda a: a | {'params.head.value': a['params.head.value'][:, :-1]}, r'head is float32 \[64, 511\]'),
        (
            lambda a: a | {'params.embedding.value': a['params.embedding.value'].astype(ml_dtypes.bfloat16)},
            r'embedding is bfloat16',
        ),
        (with_nan, r'model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight has entry \d+ that is not a finite number'),
    ],
    ids=['missing', 'extra', 'shape', 'dtype', 'nan'],
)
def test_a_checkpoint_that_is_not_the_model_is_refused_by_array(copy, tmp_path, change, words):
    target, cache = copy
    resaved(target, change)
    assert refused(IntegrityError, words, target, cache, tmp_path).exit_code == 3


def test_runs_that_did_not_finish_or_are_no_runs(copy, tmp_path):
    target, cache = copy
    about = record.read_run(target)
    record.write_run(target, about['identity'], {**about['observed'], 'status': 'interrupted'})
    refused(UsageError, 'is interrupted, not finished', target, cache, tmp_path)
    refused(UsageError, 'is not a run', tmp_path, cache, tmp_path)


def test_another_corpus_or_none_is_refused(copy, made, tmp_path):
    target, _ = copy
    other = tmp_path / 'cache' / 'corpora' / 'tiny'
    shutil.copytree(made[1] / 'corpora' / 'tiny', other)
    stated = json.loads((other / 'corpus.json').read_text())
    (other / 'corpus.json').write_text(json.dumps(stated | {'digest': 'f' * 64}))
    refused(IntegrityError, 'digest of the corpus in .* is ffffffffffff', target, tmp_path / 'cache', tmp_path)
    (other / 'tokenizer.json').write_text('{}')
    refused(IntegrityError, r'tokenizer\.json in .* is missing or not', target, tmp_path / 'cache', tmp_path)


def test_a_checkpoint_under_another_steps_name_is_refused(copy, tmp_path):
    target, cache = copy
    shutil.rmtree(target / 'checkpoints' / '40')
    shutil.copytree(target / 'checkpoints' / '20', target / 'checkpoints' / '40')
    refused(IntegrityError, 'checkpoint 40: .* is not the file that was saved', target, cache, tmp_path)
    shutil.copy(target / 'checkpoints' / '20.json', target / 'checkpoints' / '40.json')
    refused(IntegrityError, r'40\.json is not the file that the manifest names', target, cache, tmp_path)


def test_a_full_disk_is_refused_before_anything_is_written(made, tmp_path, monkeypatch):
    from ladderbook.errors import ResourceError

    run, cache, _ = made
    monkeypatch.setattr('ladderbook.machine.free_disk', lambda folder: 100_000)
    with pytest.raises(ResourceError, match='needs .* of disk'):
        export.export(run, tmp_path / 'out', cache=cache)
    assert not list((tmp_path / 'out').glob('*.safetensors'))


def test_the_heros_export_is_planned_to_the_last_parameter():
    shards = layout.plan(HERO, 'float32')
    found = [t for s in shards for t in s.tensors]
    assert sum(t.size for t in found) == 535_477_106_688 == parameters(HERO)['total']
    assert sum(s.bytes - len(s.header) for s in shards) == 4 * 535_477_106_688
    assert len(shards) == 49 and len(found) == 8 + 48 * 1177
    assert export.memory_needed(HERO) == 3 * 4 * 384 * 3072 * 3072  # one of a layer's three expert arrays, three times


# --- a manifest that a stranger wrote -----------------------------------------------------------------------------------


def resigned(change):
    "The manifest changed, its digest made again where that can be done."

    def plant(target):
        value = json.loads((target / folder.MANIFEST).read_text())
        change(value)
        try:
            value['digest'] = digest(value['request'])
        except (ValueError, TypeError, KeyError):
            pass
        (target / folder.MANIFEST).write_text(json.dumps(value))

    return plant


@pytest.mark.parametrize(
    'change, words',
    [
        (lambda m: m.update(files=[{'sha256': '', 'size': 1}]), 'files is .* expected dict'),
        (lambda m: m.update(tensors=['a']), 'tensors is .* expected dict'),
        (lambda m: m.update(request=['a']), 'request is .* expected dict'),
        (lambda m: m['tokenizer'].update(ids={'a': 1}), 'ids is .* expected list'),
        (lambda m: m['request'].update(seed=float('nan')), 'holds what no export writes'),
        (lambda m: m['request'].update(run='\ud800'), 'holds what no export writes'),
        (lambda m: m['request'].update(run='--trust-remote-code'), 'its run is .* expected letters'),
        (lambda m: m['request'].pop('run'), 'lacks the key request.run'),
        (lambda m: m['request'].pop('step'), 'lacks the key request.step'),
        (lambda m: m['request'].update(parameters=1), 'states 1 parameters'),
        (lambda m: m['request']['texts'].update({'README.md': '0' * 64}), 'names another README.md'),
        (lambda m: m['files']['README.md'].update(size=1), 'README.md is not the file'),
        (lambda m: m['tokenizer'].update(ids=[1]), 'does not cut its sample text'),
        (lambda m: m.update(version=True), 'version True'),
        (lambda m: m.update(version=1.0), r'version 1\.0'),
    ],
)
def test_a_manifest_that_was_forged_is_refused_by_its_key(made, tmp_path, change, words):
    target = tmp_path / 'export'
    shutil.copytree(made[2].folder, target)
    resigned(change)(target)
    with pytest.raises(IntegrityError, match=words):
        folder.verify(target)


def test_hidden_files_and_odd_headers_and_configs_are_refused(made, tmp_path):
    target = tmp_path / 'export'
    shutil.copytree(made[2].folder, target)
    (target / '.evil.py').write_text('')
    with pytest.raises(IntegrityError, match='evil.py does not belong'):
        folder.verify(target)
    (target / '.evil.py').unlink()
    config = json.loads((target / 'config.json').read_text())
    for seen, words in ({'dtype': ['float32']}, 'dtype is'), ({'ladderbook_schema': 1.0}, 'ladderbook_schema 1.0'):
        with pytest.raises(IntegrityError, match=words):
            layout.spec_of(config | seen)
    text = json.dumps({'a': {'dtype': 'F32', 'shape': [1], 'data_offsets': {'0': 0, '1': 4}}}).encode()
    (tmp_path / 'odd').write_bytes(len(text).to_bytes(8, 'little') + text + bytes(4))
    with pytest.raises(IntegrityError, match='data_offsets is .* expected list'):
        folder.header(tmp_path / 'odd')


def test_json_nested_without_end_and_versions_that_are_no_numbers(tmp_path):
    path = tmp_path / 'a.json'
    path.write_text('[' * 200_000)
    with pytest.raises(IntegrityError, match='is not JSON'):
        read_json(path, 's')
    for version in 'true', '1.0':
        path.write_text('{"schema": "s", "version": ' + version + '}')
        with pytest.raises(IntegrityError, match='version'):
            read_json(path, 's')


def test_a_full_disk_leaves_the_old_export(made, tmp_path, monkeypatch):
    run, cache, one = made
    target = tmp_path / 'export'
    shutil.copytree(one.folder, target)
    monkeypatch.setattr(export.machine, 'available_memory', lambda: 1000)
    with pytest.raises(ResourceError, match=r'needs \d+\.\d MB of memory; 0\.0 MB'):
        export.export(run, target, fresh=True, cache=cache)
    assert same(target, one.folder)


def test_an_unfinished_run_with_an_export_is_not_served(copy, tmp_path):
    target, cache = copy
    export.export(target, cache=cache)
    about = json.loads((target / 'run.json').read_text())
    about['observed']['status'] = 'stopped'
    (target / 'run.json').write_text(json.dumps(about))
    with pytest.raises(UsageError, match='is stopped, not finished'):
        serving.exported(target)


def test_half_an_export_is_called_one(tmp_path):
    (tmp_path / folder.PARTIAL).write_text('{}')
    with pytest.raises(UsageError, match='it was interrupted'):
        serving._folder_to_serve(SimpleNamespace(run=str(tmp_path), dtype=None))
    with pytest.raises(UsageError, match='is not an export'):
        serving._folder_to_serve(SimpleNamespace(run=str(tmp_path / 'absent'), dtype=None))
