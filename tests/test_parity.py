"""Parity must pass for the export of a run, and fail for five damaged ones, saying where the damage begins."""

import http.server
import json
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from ladderbook import settings
from ladderbook.data.tokens import open_corpus
from ladderbook.errors import IntegrityError, NumericsError, ResourceError, UsageError
from ladderbook.recipe.spec import ModelSpec
from ladderbook.serve import agreement, export, golden, parity
from ladderbook.serve.trace import EDGES, Prompts, prompts, trained
from safetensors.numpy import load_file, save_file

SPEC = ModelSpec(
    layers=4, width=64, heads=4, head_dim=32, kv_heads_local=2, kv_heads_global=1, experts=8, top_k=2, expert_width=32,
    latent_width=32, shared_experts=2, shared_width=32, vocab=512, sequence=256, window=96, norm_rank=8,
)  # fmt: skip


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    return export.example(tmp_path_factory.mktemp('parity'), SPEC)


@pytest.fixture(scope='module')
def cache(run):
    return run.parent.parent / 'cache'


@pytest.fixture(scope='module')
def exported(run, cache):
    return export.export(run, cache=cache).folder


@pytest.fixture(scope='module')
def python():
    return parity.serving_python(settings.load())


@pytest.fixture(scope='module')
def asked(run, cache):
    return prompts(open_corpus(cache / 'corpora' / 'tiny').heldout, SPEC, 8)


@pytest.fixture(scope='module')
def model(run):
    return trained(run)


def against(folder, model, asked, python, modes=(), half=False):
    return parity.check(folder, model, asked, python, modes, half)


def test_prompts_lie_around_the_edges(asked):
    assert list(asked.scored) == list(EDGES) and asked.sizes == [95, 96, 97, 255, 256]
    assert max(len(p) for p in asked.continued) + asked.new == SPEC.sequence


def test_the_plain_reference_agrees(exported, model, asked, python):
    found = against(exported, model, asked, python)
    assert found.failures == []
    assert 0 < found.fp32['pairs']['jax-transformers']['max_abs'] < 2e-5
    assert found.fp32['exempt']['of'] == 95 + 96 + 97 + 255 + 256
    assert found.fp32['greedy']['transformers']['tokens'] == 4 * 8


def changed(exported: Path, out: Path, file: str, change) -> Path:
    """A copy of the export in which `change` has been made to the tensors of `file`."""
    shutil.copytree(exported, out)
    tensors = {k: np.array(v) for k, v in load_file(out / file).items()}
    change(tensors)
    save_file(tensors, out / file, metadata={'format': 'pt'})
    return out


def layer(i: int) -> str:
    return f'model-layer-{i:05d}.safetensors'


def swapped(exported, out):
    shutil.copytree(exported, out)
    for a, b in ((1, 2), (2, 1)):
        tensors = {k.replace(f'layers.{b}.', f'layers.{a}.'): v for k, v in load_file(exported / layer(b)).items()}
        save_file(tensors, out / layer(a), metadata={'format': 'pt'})
    return out


def no_bias(exported, out):
    def change(tensors):
        tensors['model.layers.1.mlp.router.bias'][:] = 0

    return changed(exported, out, layer(1), change)


def dead_expert(exported, out):
    def change(tensors):
        for i in range(SPEC.experts):
            tensors[f'model.layers.2.mlp.experts.{i}.down_proj.weight'][:] *= i != 3

    return changed(exported, out, layer(2), change)


def other_pairing(exported, out):
    shutil.copytree(exported, out)
    config = json.loads((out / 'config.json').read_text())
    assert config['rotary_pairing'] == 'interleaved'
    (out / 'config.json').write_text(json.dumps(config | {'rotary_pairing': 'split'}))
    return out


@pytest.mark.parametrize('damage, begins', [(swapped, 2), (no_bias, 2), (dead_expert, 3), (other_pairing, 1)])
def test_a_damaged_export_fails_and_says_where(damage, begins, exported, model, asked, python, tmp_path):
    found = against(damage(exported, tmp_path / 'export'), model, asked, python)
    where = found.fp32['first_difference']
    assert where['layer'] == begins
    if damage is other_pairing:
        assert where['position'] == 1  # at position 0 nothing is turned
    assert any(f'layer {begins} (counted from 1), position {where["position"]}' in f for f in found.failures)
    assert any('jax and transformers differ by' in f for f in found.failures)


def test_another_tokenizer_fails_and_says_where(exported, cache):
    heldout = open_corpus(cache / 'corpora' / 'tiny').heldout
    found = parity.Findings(list(EDGES))
    parity.same_tokens(found, exported, cache / 'corpora' / 'tiny' / 'tokenizer.json', heldout)
    assert found.failures == []
    other = json.loads((exported / 'tokenizer.json').read_text())
    names = {i: name for name, i in other['model']['vocab'].items()}
    seen = int(next(iter(heldout.values()))[1])
    other['model']['vocab'] |= {names[seen]: seen + 1, names[seen + 1]: seen}
    (exported.parent / 'other').mkdir()
    (exported.parent / 'other' / 'tokenizer.json').write_text(json.dumps(other))
    parity.same_tokens(found, exported.parent / 'other', cache / 'corpora' / 'tiny' / 'tokenizer.json', heldout)
    assert 'tokenizer: first difference at position 1 of held-out text' in found.failures[0]


def test_the_engine_agrees(exported, model, asked, python):
    """Every mode is tried in test_vllm; here the record is made of two of them."""
    found = against(exported, model, asked, python, ('plain', 'prefix cache'))
    assert found.failures == []
    for mode in ('plain', 'prefix cache'):
        assert 0 < found.modes[mode]['max_abs'] < 2e-5
    assert found.modes['prefix cache']['facts']['cached_tokens'] > 0
    assert set(found.fp32['pairs']) == {'jax-transformers', 'jax-vllm', 'transformers-vllm'}
    assert found.fp32['greedy']['vllm']['tokens'] == 4 * 8


# what cannot be asked


def test_text_that_is_too_short():
    with pytest.raises(UsageError, match='no held-out domain has 256 tokens'):
        prompts({'a': np.arange(255)}, SPEC)


def test_no_serving_environment(monkeypatch, tmp_path):
    monkeypatch.setenv('LADDERBOOK_ENVIRONMENTS_SERVE', str(tmp_path / 'none'))
    with pytest.raises(ResourceError, match='make serve-env'):
        parity.serving_python(settings.load())


def test_a_side_that_fails_says_its_last_line(python, tmp_path):
    with pytest.raises(NumericsError, match='ended with code [12]: .*no-such'):
        parity.ask(
            python, 'ladderbook.serve.sides', {'folder': str(tmp_path / 'no-such'), 'rows': [[1]], 'dtype': 'float32'}
        )


def test_nan_is_never_agreement():
    a, judged = np.zeros((1, 2, 3)), np.ones((1, 2), bool)
    assert not agreement.agreement(a, np.full_like(a, np.nan), judged).passed()
    assert agreement.first_difference(a[None], np.full_like(a[None], np.nan), judged).layer == 0


def test_golden_answers_are_of_this_export(exported, model, asked, run, tmp_path):
    golden.write(exported, model, asked, settings.load().home, 'ladderbook parity')
    value = json.loads((exported / 'golden.json').read_text())
    assert [len(c['next']) for c in value['cases']] == [8, 8] and value['command'] == 'ladderbook parity'
    export.verify(exported)
    other = tmp_path / 'other'
    shutil.copytree(exported, other)
    (other / 'golden.json').write_text(json.dumps(value | {'export': '0' * 64}))
    with pytest.raises(IntegrityError, match='of another export'):
        golden.ask(other, 'http://127.0.0.1:9', 'm', 'float32')
    for cases in ([], value['cases'][:1], [{**c, 'next': c['next'][:1]} for c in value['cases']]):
        (other / 'golden.json').write_text(json.dumps(value | {'cases': cases}))
        with pytest.raises(NumericsError, match='does not hold two whole cases'):
            golden.ask(other, 'http://127.0.0.1:9', 'm', 'float32')
    (other / 'golden.json').unlink()
    with pytest.raises(UsageError, match='has no golden.json'):
        golden.ask(other, 'http://127.0.0.1:9', 'm', 'float32')
    assert isinstance(asked, Prompts)


class Answers(http.server.BaseHTTPRequestHandler):
    """A completions endpoint that gives the golden answers of `cases`, its own distance away."""

    cases, away = [], 0.0

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers['content-length'])))
        case = next(c for c in self.cases if c['tokens'] == asked['prompt'])
        pairs = zip(case['best'], case['logprobs'], strict=True)
        first = {f'token_id:{i}': v - self.away for i, v in pairs}
        choice = {'token_ids': case['next'], 'logprobs': {'top_logprobs': [first]}}
        body = json.dumps({'choices': [choice]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def test_a_server_must_give_the_golden_answers(exported, model, asked):
    Answers.cases = golden.write(exported, model, asked, settings.load().home, 'a test')['cases']
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f'http://127.0.0.1:{server.server_address[1]}'
    try:
        Answers.away = 0.0
        assert golden.ask(exported, url, 'm', 'float32') == 2
        Answers.away = 0.01  # too far in single precision, near enough in half
        assert golden.ask(exported, url, 'm', 'bfloat16') == 2
        with pytest.raises(NumericsError, match='golden case 1: entry .* expected'):
            golden.ask(exported, url, 'm', 'float32')
    finally:
        server.shutdown()
        server.server_close()
