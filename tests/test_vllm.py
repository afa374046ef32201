"""The model in stock vLLM against the trained model: shapes, modes, routing, refusals; one process of the serving side."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from ladderbook.model.lm import Compute, filled, table
from ladderbook.recipe.spec import ModelSpec
from ladderbook.serve import agreement, folder, layout
from ladderbook.serve.trace import trace
from ladderbook.settings import load

PYTHON = load().environments.serve / 'bin' / 'python'
LIMIT = 2e-5
SPECS = {
    'main': ModelSpec(
        layers=4, width=64, heads=4, head_dim=32, kv_heads_local=2, kv_heads_global=1, experts=8, top_k=2,
        expert_width=40, latent_width=24, shared_experts=2, shared_width=40, vocab=512, sequence=192, window=24, norm_rank=8,
    ),
    'other': ModelSpec(
        layers=5, width=96, heads=8, head_dim=32, kv_heads_local=4, kv_heads_global=4, experts=6, top_k=3,
        expert_width=32, latent_width=64, shared_experts=1, shared_width=24, vocab=300, sequence=48, window=7, norm_rank=4,
        global_every=2, sconv_taps=3, sconv_sites=('mlp', 'key'), rope_pairing='split', rope_fraction=1.0, combine_sum=1.5,
    ),
    'plain': ModelSpec(
        layers=2, width=64, heads=2, head_dim=64, kv_heads_local=1, kv_heads_global=1, experts=4, top_k=1, expert_width=32,
        latent_width=32, shared_experts=1, shared_width=32, vocab=128, sequence=40, window=16, norm_rank=4, sconv_sites=(),
    ),
}  # fmt: skip
SIZES = {'main': (1, 5, 23, 24, 25, 191, 192), 'other': (6, 7, 8, 47, 48), 'plain': (15, 16, 17, 40)}
CONTINUED = (16, 65, 100, 150)
NEW, GROWN = 32, 128

# What runs in the serving environment, in one process: LLM() takes seconds, importing it takes ten.
ASKED = """
import json, sys
from pathlib import Path
import numpy as np
import torch
from ladderbook.serve import engine, vllm_model
from vllm.model_executor.layers.fused_moe.router.cpu_router import _grouped_topk

work = json.loads(Path(sys.argv[1]).read_text())
found = {}
for name, prompts in work['prompts'].items():
    llm = engine.engine(Path(work['folders'][name]))
    choices = engine.Choices()
    vllm_model.heard.append(choices)
    for i, p in enumerate(prompts):
        choices.clear()
        (found[f'{name} {i}'],) = engine.logprobs(llm, [p])
        found[f'{name} sets {i}'] = choices.sets(len(p))
    vllm_model.heard.clear()
    found |= {f'{name} together {i}': a for i, a in enumerate(engine.logprobs(llm, prompts))}
    del llm
request = {'folder': work['folders']['main'], 'dtype': 'float32', 'prompts': [], 'continued': work['continued'], 'new': work['new']}
for mode in engine.MODES:
    asked = request | {'prompts': work['prompts']['main'] if mode == 'chunk 1' else []}
    if mode == 'preemption':
        asked |= work['growing']
    found |= {f'{mode} {k}': v for k, v in engine.answer(asked | {'mode': mode}).items()}
half = engine.answer(request | {'folder': work['folders']['half'], 'mode': 'plain', 'dtype': 'bfloat16', 'prompts': work['prompts']['main'], 'new': 0})
found |= {f'half {k}': v for k, v in half.items()}

ours = vllm_model.choose
vllm_model.choose = lambda logits, bias, k, total, eps: _grouped_topk(logits, k, True, 1, 1, 'sigmoid', total, bias)
llm = engine.engine(Path(work['folders']['main']))
found |= {f'grouped {i}': a for i, a in enumerate(engine.logprobs(llm, work['prompts']['main']))}
vllm_model.choose = ours
del llm

said = {}
for name, options in work['refused'].items():
    try:
        engine.engine(Path(work['folders'].get(name, work['folders']['main'])), **options)
        said[name] = 'nothing was refused'
    except Exception as e:
        said[name] = f'{type(e).__name__}: {e}'
found['said'] = np.array(json.dumps(said))
found['jax'] = np.array('jax' in sys.modules)
np.savez(sys.argv[2], **found)
"""
REFUSED = {
    'quantised': {'quantization': 'fp8', 'dtype': 'bfloat16'},
    'half precision': {'dtype': 'float16'},
    'cut': {},
    'strange': {},
    'small heads': {},
}


def arrays(spec, seed=1, scale=1.0):
    "Random arrays in which nothing is at rest, matrices of `scale`; router biases as large as the logits they are added to."
    rng, found = np.random.default_rng(seed), {}
    for path, leaf in table(spec).items():
        a = rng.standard_normal(leaf.shape, np.float32)
        if leaf.init == 'normal' and path != 'embedding':
            a *= scale * leaf.shape[-2] ** -0.5
        elif leaf.init in ('ones', 'identity_conv'):
            a *= 0.3
        elif leaf.init == 'zeros' and not path.endswith('router_bias'):
            a *= 0.125
        if leaf.init == 'ones':
            a += 1
        if leaf.init == 'identity_conv':
            a[..., 0, :] += 1
        found[path] = a.astype(np.float32)
    return found


def write(out, spec, values):
    "What an engine reads of an export."
    out.mkdir(parents=True)
    shards = layout.plan(spec, 'float32')
    for s in shards:
        folder.write_shard(
            out, s, 'float32', lambda leaf, layer: values[leaf] if layer is None else values[leaf][layer]
        )
    (out / 'config.json').write_text(json.dumps(layout.config(spec, 'float32')))
    (out / folder.INDEX).write_text(json.dumps(layout.index(shards)))
    return out


def renamed(out, spec, values, old, new):
    "An export in which one tensor has another name."
    write(out, spec, values)
    for p in (*out.glob('*.safetensors'), out / folder.INDEX):
        p.write_bytes(p.read_bytes().replace(old.encode(), new.encode()))
    return out


@pytest.fixture(scope='module')
def work(tmp_path_factory):
    where = tmp_path_factory.mktemp('vllm')
    values = {name: arrays(spec) for name, spec in SPECS.items()}
    folders = {name: str(write(where / name, spec, values[name])) for name, spec in SPECS.items()}
    main = SPECS['main'], values['main']
    values['half'] = arrays(SPECS['main'], scale=0.5)
    folders['half'] = str(write(where / 'half', SPECS['main'], values['half']))
    folders['cut'] = str(write(where / 'cut', *main))
    lost = Path(folders['cut']) / 'model-layer-00003.safetensors'
    lost.write_bytes((Path(folders['cut']) / 'model-layer-00002.safetensors').read_bytes())
    folders['strange'] = str(renamed(where / 'strange', *main, 'layers.2.mlp.router.bias', 'layers.2.mlp.router.bios'))
    small = replace(SPECS['plain'], head_dim=16)
    folders['small heads'] = str(write(where / 'small heads', small, arrays(small)))
    rng = np.random.default_rng(5)

    def draw(n, vocab):
        return rng.integers(1, vocab, n).tolist()

    prompts = {name: [draw(n, SPECS[name].vocab) for n in sizes] for name, sizes in SIZES.items()}
    asked = {'folders': folders, 'prompts': prompts, 'continued': [draw(n, 512) for n in CONTINUED], 'new': NEW}
    asked['growing'] = {'continued': [draw(16, 512) for _ in CONTINUED], 'new': GROWN}
    (where / 'asked.json').write_text(json.dumps(asked | {'refused': REFUSED}))
    command = [str(PYTHON), '-c', ASKED, str(where / 'asked.json'), str(where / 'found.npz')]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    with np.load(where / 'found.npz', allow_pickle=False) as found:
        return asked, dict(found), {name: filled(SPECS.get(name, SPECS['main']), values[name]) for name in values}


def traced(model, prompts, compute=None):
    rows = np.zeros((len(prompts), model.spec.sequence), np.int32)
    for row, p in zip(rows, prompts, strict=True):
        row[: len(p)] = p
    told = trace(model, jnp.asarray(rows), compute or Compute(dropless=True, attention_block=64))
    return type(told)(*map(np.asarray, told))


def judged(told, i, size):
    "Positions of prompt `i` at which rounding does not decide between experts, in any layer or at any position before."
    close = agreement.close_calls(told.gaps)[i, :size]
    assert close.sum() <= 1
    return ~np.logical_or.accumulate(close)


@pytest.mark.parametrize('name', SPECS)
@pytest.mark.parametrize('how', ['', 'together '])
def test_every_entry_at_every_position(work, name, how):
    asked, found, models = work
    told = traced(models[name], asked['prompts'][name])
    seen = 0
    for i, p in enumerate(asked['prompts'][name]):
        here = judged(told, i, len(p))
        said = found[f'{name} {how}{i}']
        assert said.shape == (len(p), SPECS[name].vocab)
        assert np.abs(said - told.logprobs[i, : len(p)])[here].max() <= LIMIT
        assert np.abs(np.exp(said.astype(np.float64)).sum(-1) - 1).max() < 1e-4
        seen += here.sum()
    assert seen > 0.98 * sum(SIZES[name])


@pytest.mark.parametrize('name', SPECS)
def test_the_experts_are_the_trained_models(work, name):
    asked, found, models = work
    told = traced(models[name], asked['prompts'][name])
    moved = 0
    for i, p in enumerate(asked['prompts'][name]):
        here = judged(told, i, len(p))
        assert (found[f'{name} sets {i}'] == told.experts[:, i, : len(p)])[:, here].all()
        moved += len(np.unique(told.experts[:, i, : len(p)]))
    assert moved > SPECS[name].top_k * len(asked['prompts'][name])


def test_the_bias_changes_sets_and_the_grouped_path_of_vllm_fails(work):
    asked, found, models = work
    prompts, model = asked['prompts']['main'], models['main']
    values = arrays(SPECS['main'])
    bias = values['blocks.router_bias']
    values['blocks.router_bias'] = np.zeros_like(bias)
    told, without = traced(model, prompts), traced(filled(SPECS['main'], values), prompts)
    assert (told.experts[0] != without.experts[0]).any(-1).mean() > 0.3
    far = [np.abs(found[f'grouped {i}'] - told.logprobs[i, : len(p)]).max() for i, p in enumerate(prompts)]
    assert min(far) > 1e-2


@pytest.mark.parametrize('mode, shown', [('plain', None), ('chunk 1', 'chunks'), ('prefix cache', 'cached_tokens'), ('preemption', 'preemptions')])  # fmt: skip
def test_modes_of_the_engine(work, mode, shown):
    asked, found, models = work
    facts = json.loads(str(found[f'{mode} facts']))
    if shown:
        assert facts[shown] > 0
    if mode == 'prefix cache':
        assert facts['cached'] == [0, 64, 64, 128]
    if mode == 'chunk 1':
        assert facts['tokens_in_a_step'] <= len(SIZES['main']) and facts['chunks'] >= 192
        told = traced(models['main'], asked['prompts']['main'])
        for i, p in enumerate(asked['prompts']['main']):
            here = judged(told, i, len(p))
            assert np.abs(found[f'{mode} logprobs_{i}'] - told.logprobs[i, : len(p)])[here].max() <= LIMIT
        return
    grows = mode == 'preemption'
    texts, new = asked['growing']['continued'] if grows else asked['continued'], GROWN if grows else NEW
    new = 1 if mode == 'prefix cache' else new
    tokens = [found[f'{mode} tokens_{i}'].tolist() for i in range(len(texts))]
    whole = traced(models['main'], [p + t for p, t in zip(texts, tokens, strict=True)])
    for i, (p, t) in enumerate(zip(texts, tokens, strict=True)):
        n = len(p)
        assert len(t) == new
        here = judged(whole, i, n + new)[n - 1 : n - 1 + new]
        plain = whole.logprobs[i, n - 1 : n - 1 + new]
        assert here.any() and np.abs(found[f'{mode} new_logprobs_{i}'] - plain)[here].max() <= LIMIT
        assert (plain.argmax(-1) == t)[here].all()


def test_bfloat16(work):
    asked, found, models = work
    prompts = asked['prompts']['main']
    told = traced(models['half'], prompts, Compute('bfloat16', dropless=True, attention_block=64))
    far, same, of = [], 0, 0
    for i, p in enumerate(prompts):
        equal = (found[f'half experts_{i}'] == told.experts[:, i, : len(p)]).all((0, -1))
        far.append(np.abs(found[f'half logprobs_{i}'] - told.logprobs[i, : len(p)])[equal].ravel())
        same, of = same + equal.sum(), of + len(p)
    far = np.concatenate(far)
    assert np.median(far) <= agreement.BF16_MEDIAN and np.quantile(far, 0.99) <= agreement.BF16_TAIL
    assert same > 0.7 * of


@pytest.mark.parametrize('name, says', [
    ('quantised', 'quantization is fp8; this model is served in the dtype of its export, unquantised'),
    ('half precision', 'dtype is torch.float16; expected float32 or bfloat16'),
    ('cut', 'has tensor model.layers.2.'),
    ('strange', 'has tensor model.layers.2.mlp.router.bios, which this model does not have'),
    ('small heads', 'head_dim is 16; vLLM attends on this device with heads of 32, '),
])  # fmt: skip
def test_what_is_refused(work, name, says):
    assert says in json.loads(str(work[1]['said']))[name]


def test_no_jax_on_the_serving_side(work):
    assert not work[1]['jax']


COMPILED = """
import json, sys
from pathlib import Path
import numpy as np
from ladderbook.serve import engine

asked = json.loads(Path(sys.argv[1]).read_text())
llm = engine.engine(Path(asked['folder']), compiled=True)
found = {f'together {i}': a for i, a in enumerate(engine.logprobs(llm, asked['prompts']))}
tokens, said, _ = engine.continuations(llm, asked['prompts'][:3], asked['new'])
found |= {f'tokens {i}': t for i, t in enumerate(tokens)} | {f'said {i}': a for i, a in enumerate(said)}
np.savez(sys.argv[2], **found)
"""


def test_compiled(tmp_path):
    spec = replace(SPECS['main'], layers=2, global_every=2)
    values, rng = arrays(spec), np.random.default_rng(7)
    prompts, new = [rng.integers(1, spec.vocab, n).tolist() for n in (2, 20, 40, 191)], 16
    asked = {'folder': str(write(tmp_path / 'model', spec, values)), 'prompts': prompts, 'new': new}
    (tmp_path / 'asked.json').write_text(json.dumps(asked))
    command = [str(PYTHON), '-c', COMPILED, str(tmp_path / 'asked.json'), str(tmp_path / 'found.npz')]
    caches = {'VLLM_CACHE_ROOT': str(tmp_path / 'cache'), 'TORCHINDUCTOR_CACHE_DIR': str(tmp_path / 'inductor')}
    environment = {**os.environ, **caches}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert list(tmp_path.rglob('*.so')), 'nothing was compiled'
    found, model = np.load(tmp_path / 'found.npz'), filled(spec, values)
    told = traced(model, prompts)
    for i, p in enumerate(prompts):
        here = judged(told, i, len(p))
        assert np.abs(found[f'together {i}'] - told.logprobs[i, : len(p)])[here].max() <= LIMIT
    whole = traced(model, [p + found[f'tokens {i}'].tolist() for i, p in enumerate(prompts[:3])])
    for i, p in enumerate(prompts[:3]):
        n = len(p)
        here = judged(whole, i, n + new)[n - 1 : n - 1 + new]
        plain = whole.logprobs[i, n - 1 : n - 1 + new]
        assert here.any() and np.abs(found[f'said {i}'] - plain)[here].max() <= LIMIT
        assert (plain.argmax(-1) == found[f'tokens {i}'])[here].all()
