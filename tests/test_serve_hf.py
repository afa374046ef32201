"""The transformers side against the trained model: every position, both pairings, caches, padding, bfloat16, refusals."""

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from ladderbook.model.lm import table
from ladderbook.recipe.spec import ModelSpec
from ladderbook.serve import agreement, export, folder, layout, trace
from ladderbook.settings import load

ROOT = Path(__file__).resolve().parent.parent
PYTHON = load().environments.serve / 'bin' / 'python'
SPEC = ModelSpec(
    layers=5, width=64, heads=8, head_dim=16, kv_heads_local=4, kv_heads_global=2, experts=8, top_k=2, expert_width=32,
    latent_width=24, shared_experts=2, shared_width=32, vocab=512, sequence=64, window=20, norm_rank=8,
)  # fmt: skip
ROWS = np.random.default_rng(1).integers(0, SPEC.vocab, (3, SPEC.sequence))
PROMPTS = [ROWS[0, :5].tolist(), ROWS[1, :10].tolist(), ROWS[2, :24].tolist()]
NEW = 40


def arrays(spec, scale, seed=0):
    "Random arrays in which nothing is at rest: gains, taps, gates and biases too; matrices of `scale` / sqrt(inputs)."
    rng, found = np.random.default_rng(seed), {}
    for path, leaf in table(spec).items():
        a = rng.standard_normal(leaf.shape, np.float32)
        if leaf.init == 'normal' and path != 'embedding':
            a *= scale / leaf.shape[-2] ** 0.5
        elif leaf.init in ('ones', 'identity_conv'):
            a *= 0.3
        elif leaf.init == 'zeros':
            a *= 0.5 if path.endswith('router_bias') else 0.125
        if leaf.init == 'ones':
            a += 1
        if leaf.init == 'identity_conv':
            a[..., 0, :] += 1
        found[path] = a.astype(np.float32)
    return found


def write(out, spec, dtype='float32', scale=1.0, change=None):
    "What transformers reads of an export, of random arrays; `change(arrays)` may alter them first."
    out.mkdir(parents=True)
    values = arrays(spec, scale)
    if change:
        change(values)
    shards = layout.plan(spec, dtype)
    for s in shards:
        folder.write_shard(out, s, dtype, lambda leaf, layer: values[leaf] if layer is None else values[leaf][layer])
    (out / 'config.json').write_text(json.dumps(layout.config(spec, dtype)))
    (out / 'generation_config.json').write_text(json.dumps({'eos_token_id': 0, 'do_sample': False}))
    (out / folder.INDEX).write_text(json.dumps(layout.index(shards)))
    return out


def python(code, *arguments):
    "Run `code` in the serving environment; what it prints last is its answer in JSON."
    assert PYTHON.exists(), f'{PYTHON} is not there; make it: make serve-env'
    command = [PYTHON, '-W', 'error::UserWarning:ladderbook', '-c', code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


ASK = """
import json, sys
import numpy as np
from ladderbook.serve.sides import answer

for i, request in enumerate(json.load(open(sys.argv[1] + '/requests.json'))):
    np.savez(f'{sys.argv[1]}/{i}.npz', **answer(request))
assert not [m for m in sys.modules if m.split('.')[0] in ('jax', 'flax')]
print('{}')
"""


def ask(tmp_path, *requests):
    "The transformers side's answers, all from one process without JAX."
    (tmp_path / 'requests.json').write_text(json.dumps(requests))
    python(ASK, tmp_path)
    return [dict(np.load(tmp_path / f'{i}.npz')) for i in range(len(requests))]


def asked(out, dtype='float32', **more):
    return {'folder': str(out), 'dtype': dtype, 'rows': ROWS.tolist()} | more


def taken(answer):
    return trace.Trace(*(answer[name] for name in trace.Trace._fields))


def trained(out, dtype='float32'):
    "The training side's account of the same folder."
    model = export.state(out, checked=True)
    compute = replace(trace.EXACT, dtype=dtype)
    return trace.Trace(*map(np.asarray, trace.trace(model, jnp.asarray(ROWS, jnp.int32), compute)))


# --- float32 ----------------------------------------------------------------------------------------------------------

VARIANTS = {
    'interleaved': SPEC,
    'split': replace(SPEC, rope_pairing='split', rope_fraction=0.25),
    'other': replace(
        SPEC, layers=3, global_every=2, kv_heads_local=8, kv_heads_global=1, top_k=3, latent_width=40, window=3,
        rope_fraction=1.0, sconv_taps=3, sconv_sites=('mlp', 'key'), combine_sum=1.7, qk_multiplier=0.9, norm_eps=1e-3,
        rope_theta=500.0, qk_eps=1e-3,
    ),
}  # fmt: skip


def test_every_log_probability_stream_and_choice(tmp_path):
    requests = []
    for name, spec in VARIANTS.items():
        requests.append(asked(write(tmp_path / name, spec), prompts=PROMPTS, new=NEW))
    for (name, spec), said in zip(VARIANTS.items(), ask(tmp_path, *requests), strict=True):
        own, other = trained(tmp_path / name), taken(said)
        judged = ~agreement.close_calls(own.gaps)
        assert (~judged).mean() < 0.001
        assert agreement.agreement(own.logprobs, other.logprobs, judged).passed(2e-5), name
        assert agreement.first_difference(own.streams, other.streams, judged, relative=1e-5) is None, name
        assert (own.experts == other.experts)[:, judged].all()
        np.testing.assert_allclose(own.gaps, other.gaps, atol=2e-5)
        if name == 'other':
            greedy = trace.greedy(export.state(tmp_path / name, checked=True), PROMPTS, NEW)
            np.testing.assert_array_equal(greedy, said['greedy'])
        assert [own.experts.shape[-1], own.streams.shape[0]] == [spec.top_k, spec.layers + 1]


def zero(path):
    return lambda values: values[path].fill(0)


def flip(path):
    return lambda values: values.update({path: np.ascontiguousarray(values[path][:, ::-1])})


MISTAKES = {  # what the comparison would miss in a model in which these parts are at rest
    'the bias is dropped': (SPEC, zero('blocks.router_bias')),
    'head gates are dropped': (SPEC, zero('blocks.attention.gate')),
    'taps of the keys run backwards': (SPEC, flip('blocks.attention.taps')),
    'taps of the attention run backwards': (SPEC, flip('blocks.attention_taps')),
    'taps of the experts run backwards': (SPEC, flip('blocks.mlp_taps')),
    'the other pairing': (replace(SPEC, rope_pairing='split'), None),
    'a window one shorter': (replace(SPEC, window=19), None),
    'a global layer fewer': (replace(SPEC, global_every=5), None),
    'other global heads': (replace(SPEC, kv_heads_global=1), None),
}


def test_each_mistake_shows(tmp_path):
    own = trained(write(tmp_path / 'right', SPEC))
    wrong = [write(tmp_path / f'wrong-{i}', spec, change=change) for i, (spec, change) in enumerate(MISTAKES.values())]
    for name, said in zip(MISTAKES, ask(tmp_path, *(asked(w) for w in wrong)), strict=True):
        far = agreement.agreement(own.logprobs, said['logprobs'], np.ones(ROWS.shape, bool))
        assert far.max_abs > 0.01, name
        first = agreement.first_difference(own.streams, said['streams'], np.ones(ROWS.shape, bool))
        if name == 'a window one shorter':
            assert (first.layer, first.position) == (1, 19)
        if name == 'a global layer fewer':
            assert first.layer == 4


# --- bfloat16 ---------------------------------------------------------------------------------------------------------


def test_bfloat16_is_as_far_from_float32_as_the_trained_side(tmp_path):
    rounded = write(tmp_path / 'bf16', SPEC, 'bfloat16', scale=0.5)
    kept = write(tmp_path / 'fp32', SPEC, 'float32', scale=0.5)
    side, cast = map(taken, ask(tmp_path, asked(rounded, 'bfloat16'), asked(kept, 'bfloat16')))
    inside = np.ones(ROWS.shape, bool)
    own, exact = trained(rounded, 'bfloat16'), trained(rounded)
    far = agreement.coarse(own, side, inside)
    assert far['median'] <= 0.02 and far['p99'] <= 0.1 and far['flip_rate'] < 0.02, far
    own_error, error = agreement.coarse(exact, own, inside), agreement.coarse(exact, side, inside)
    assert error['median'] < 1.5 * own_error['median'] and error['median'] > 0
    for a, b in zip(side, cast, strict=True):  # rounded when written or when read: the router stays in float32 in both
        np.testing.assert_array_equal(a, b)


def test_a_router_in_bfloat16_rounds_what_the_trained_side_rounds(tmp_path):
    out = write(tmp_path / 'model', replace(SPEC, router_dtype='bfloat16'))
    (said,) = ask(tmp_path, asked(out))
    far = np.abs(trained(out).logprobs - said['logprobs'])
    assert np.median(far) < 2e-6 and far.max() < 1e-2  # an input between two bfloat16 numbers may fall to either
    (said,) = ask(tmp_path, asked(write(tmp_path / 'wide', SPEC)))
    assert np.median(np.abs(trained(out).logprobs - said['logprobs'])) > 1e-4


# --- transformers' own ways in ----------------------------------------------------------------------------------------

GENERATE = """
import json, sys
import torch
import ladderbook.serve.hf
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

folder, prompts, new = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
model = AutoModelForCausalLM.from_pretrained(folder)
model.generation_config.eos_token_id = None
how = dict(max_new_tokens=new, do_sample=False, pad_token_id=0)


def write(rows, **more):
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(r)) + r for r in rows])
    mask = torch.tensor([[0] * (longest - len(r)) + [1] * len(r) for r in rows])
    return model.generate(ids, attention_mask=mask, **{**how, **more})[:, longest:].tolist()


found = {
    'alone': [write([p])[0] for p in prompts],
    'without a cache': [write([p], use_cache=False)[0] for p in prompts],
    'behind padding': write(prompts),
    'beams': write(prompts[:2], num_beams=3, max_new_tokens=12),
    'beams without a cache': write(prompts[:2], num_beams=3, max_new_tokens=12, use_cache=False),
}
for name, more in {'assisted': {'prompt_lookup_num_tokens': 3}, 'static': {'cache_implementation': 'static'}}.items():
    try:
        write(prompts[:1], **more)
    except Exception as e:
        found[name] = f'{type(e).__name__}: {e}'

body, ids = AutoModel.from_pretrained(folder), torch.tensor([prompts[2]])
with torch.no_grad():
    whole = model(ids, labels=ids)
    torch.testing.assert_close(model.lm_head(body(ids).last_hidden_state), whole.logits)
    log = whole.logits.log_softmax(-1)
    torch.testing.assert_close(-log[0, :-1].gather(1, ids[0, 1:, None]).mean(), whole.loss)
    torch.testing.assert_close(model(ids, logits_to_keep=1).logits, whole.logits[:, -1:])
    assert torch.equal(model(ids, return_dict=False)[0], whole.logits)
model(ids, labels=ids).loss.backward()
found['without a gradient'] = [n for n, p in model.named_parameters() if p.grad is None and '.experts.' not in n]

model.save_pretrained(sys.argv[4])
again = AutoModelForCausalLM.from_pretrained(sys.argv[4], dtype='bfloat16')
found['saved'] = sorted(p.dtype is torch.float32 and n for n, p in again.named_parameters() if p.dtype is torch.float32)
found['config'] = json.load(open(sys.argv[4] + '/config.json'))
print(json.dumps(found))
"""


def test_generate_in_every_way_and_back_to_disk(tmp_path):
    out = write(tmp_path / 'model', SPEC)
    found = python(GENERATE, out, json.dumps(PROMPTS), NEW, tmp_path / 'again')
    truth = trace.greedy(export.state(out, checked=True), PROMPTS, NEW).tolist()
    assert found['alone'] == found['without a cache'] == found['behind padding'] == truth
    assert found['beams'] == found['beams without a cache'] != [t[:12] for t in truth[:2]]
    assert 'assisted' in found['assisted'].lower() and found['static'].startswith(
        'UsageError: past_key_values is a Static'
    )
    assert found['without a gradient'] == [f'model.layers.{i}.mlp.router.bias' for i in range(5)]
    routers = [f'model.layers.{i}.mlp.router.{part}' for i in range(5) for part in ('bias', 'weight')]
    assert found['saved'] == routers
    assert layout.spec_of(found['config']) == SPEC
    saved = trained_from(tmp_path / 'again')
    for path, value in arrays(SPEC, 1.0).items():
        np.testing.assert_array_equal(saved[path], value)


def trained_from(out):
    "The arrays, by path, of the single file that `save_pretrained` wrote."
    from safetensors.numpy import load_file

    stored, found = load_file(out / 'model.safetensors'), {}
    for t in layout.tensors(SPEC):
        a = found.setdefault(t.leaf, np.empty(table(SPEC)[t.leaf].shape, np.float32))
        a[tuple(i for i in (t.layer, t.index) if i is not None) or ...] = layout.inward(stored.pop(t.name), t)
    assert not stored
    return found


# --- refusals ---------------------------------------------------------------------------------------------------------

REFUSED = """
import json, sys
from ladderbook.errors import LadderbookError
from ladderbook.serve.sides import answer

found = []
for request in json.load(open(sys.argv[1])):
    try:
        answer(request)
        found.append('nothing was refused')
    except LadderbookError as e:
        found.append(f'{type(e).__name__}: {e}')
print(json.dumps(found))
"""


def damaged(out, good, **config):
    shutil.copytree(good, out)
    stated = json.loads((out / 'config.json').read_text())
    (out / 'config.json').write_text(json.dumps({**stated, **config}))
    return str(out)


def test_what_is_refused_is_said_in_one_sentence(tmp_path):
    good = write(tmp_path / 'good', SPEC)
    ok = {'folder': str(good), 'dtype': 'float32', 'rows': [[1, 2, 3]]}
    lost = tmp_path / 'lost'
    shutil.copytree(good, lost)
    index = json.loads((lost / folder.INDEX).read_text())
    (lost / 'model-layer-00002.safetensors').unlink()
    index['weight_map'] = {k: v for k, v in index['weight_map'].items() if 'layer-00002' not in v}
    (lost / folder.INDEX).write_text(json.dumps(index))
    cases = {
        'a text of 65 tokens; the model was trained on at most 64': ok | {'rows': [[1] * 65]},
        'prompts of [30] tokens and 35 more': {**ok, 'prompts': [[1] * 30], 'new': 35},
        'missing keys: model.layers.2.': ok | {'folder': str(lost)},
        'mismatched keys: ': ok | {'folder': damaged(tmp_path / 'wide', good, latent_size=40)},
        'unexpected keys: model.layers.': ok | {'folder': damaged(tmp_path / 'few', good, num_experts=7)},
        'ladderbook_schema 2': ok | {'folder': damaged(tmp_path / 'newer', good, ladderbook_schema=2)},
        'layer_schedule': ok | {'folder': damaged(tmp_path / 'order', good, layer_schedule=['global'] + ['local'] * 4)},
        'config.json has sliding_window': ok | {'folder': damaged(tmp_path / 'foreign', good, sliding_window=20)},
        'rows has [512]': ok | {'rows': [[512]]},
        "no model computes in 'float16'": ok | {'dtype': 'float16'},
        'is not an export': ok | {'folder': str(tmp_path)},
        "the request has 'lines'": ok | {'lines': []},
    }
    (tmp_path / 'requests.json').write_text(json.dumps(list(cases.values())))
    for expected, said in zip(cases, python(REFUSED, tmp_path / 'requests.json'), strict=True):
        assert expected in said and '\n' not in said, said


def test_the_command_says_a_fault_and_exits_with_its_code(tmp_path):
    (tmp_path / 'request.json').write_text(json.dumps({'folder': 'nowhere', 'dtype': 'float32', 'rows': [[1]]}))
    command = [PYTHON, '-m', 'ladderbook.serve.sides', tmp_path / 'request.json', tmp_path / 'out.npz']
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 2 and done.stderr == 'nowhere is not an export: it has no config.json\n'
    assert not (tmp_path / 'out.npz').exists()
