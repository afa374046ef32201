"""The model against Marin's published numbers, plain references, and the inputs it refuses."""

import dataclasses
import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from ladderbook.errors import UsageError
from ladderbook.model import attention as att
from ladderbook.model import experts as exp
from ladderbook.model import norms, routing
from ladderbook.model.lm import GROUPS, LM, Compute, RouterBias, groups, hidden, table
from ladderbook.recipe.spec import ModelSpec, initial_norm, parameters

TINY = ModelSpec(
    layers=2, width=32, heads=4, head_dim=8, kv_heads_local=2, kv_heads_global=1, experts=8, top_k=2, expert_width=12,
    latent_width=16, shared_experts=2, shared_width=12, vocab=64, sequence=32, window=10, norm_rank=4, global_every=2,
    capacity_factor=1.25,
)  # fmt: skip
TOLERANCE = 2e-6


def load(path):
    with np.load(path) as z:
        return {k: jnp.asarray(v) for k, v in z.items()}


@pytest.fixture(scope='module')
def layers(root):
    return load(root / 'tests/data/marin/layers.npz')


@pytest.fixture(scope='module')
def qb(root):
    return load(root / 'tests/data/marin/qb.npz')


def near(mine, theirs, tolerance=TOLERANCE):
    assert mine.shape == theirs.shape
    assert np.abs(np.asarray(mine) - theirs).max() <= tolerance * max(1, np.abs(theirs).max())


# norms, RoPE and the short convolution


def test_norms_published(layers):
    x, gain = layers['norm/x'], layers['norm/gain']
    near(norms.rms_norm(x, gain, 1e-5), layers['norm/rms_eps1e-5'])
    near(norms.plain_norm(x, 1e-6), layers['norm/rms_plain_eps1e-6'])
    near(norms.gated_norm(x, layers['norm/gated_down'], layers['norm/gated_up']), layers['norm/gated'])


@pytest.mark.parametrize('pairing, name', [('interleaved', 'interleaved'), ('split', 'split_half')])
def test_rope_published(layers, pairing, name):
    angles = att.rope_angles(24, 16, 10_000.0, 1.0)
    for x in ('q', 'k'):
        near(att.rotate(layers[f'rope/{x}'], angles, pairing), layers[f'rope/{x}_{name}'])


@pytest.mark.parametrize('kind', ['plain', 'packed'])
def test_short_conv_published(layers, kind):
    x, taps, d = (layers[f'sconv/{n}'] for n in ('x', 'taps', 'cotangent'))
    segments = layers['sconv/segments'] if kind == 'packed' else jnp.ones(x.shape[:2], jnp.int32)
    y, pull = jax.vjp(lambda x, taps: att.short_conv(x, taps, segments), x, taps)
    for mine, name in zip((y, *pull(d)), ('y', 'dx', 'dtaps'), strict=True):
        near(mine, layers[f'sconv/{name}_{kind}'])


# attention


@pytest.mark.parametrize('kind', ['causal', 'window5', 'packed', 'window5_packed'])
@pytest.mark.parametrize('run', [att.plain_attention, partial(att.attend, block=4)], ids=['plain', 'blockwise'])
def test_attention_core_published(layers, kind, run):
    q, k, v = (layers[f'sdpa/{n}'] for n in 'qkv')
    segments = layers['sdpa/segments'] if 'packed' in kind else jnp.ones(q.shape[:2], jnp.int32)
    near(run(q, k, v, segments, 5 if 'window5' in kind else 16), layers[f'sdpa/{kind}'])


@pytest.mark.parametrize('packed', ['', '_packed'])
@pytest.mark.parametrize('reach', ['local', 'global'])
@pytest.mark.parametrize('kind', ['snowball', 'hero'])
def test_attention_layer_published(layers, kind, reach, packed):
    """The 67B recipe's layer (split halves, all KV heads, no convolution) and the hero's, local and global."""
    a = {k.removeprefix('attn/'): v for k, v in layers.items()}
    hero = kind == 'hero'
    spec = dataclasses.replace(
        TINY, width=64, head_dim=16, window=8, rope_pairing='interleaved' if hero else 'split',
        kv_heads_global=1 if hero else 2,
    )  # fmt: skip
    weights = att.AttentionWeights(*(a[f'w_{n}'] for n in ('q', 'k', 'v', 'o', 'gate')), a['k_taps'] if hero else None)
    segments = a['segments'] if packed else jnp.ones(a['x'].shape[:2], jnp.int32)
    y = att.attention(a['x'], weights, segments, jnp.asarray(reach == 'global'), spec, block=8)
    near(y, a[f'{kind}_{reach}{packed}'])


def test_global_kv_heads_are_repeated_in_place():
    """Of four stored heads a global layer keeps two: query heads 0-3 read the first, 4-7 the second."""
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 8, n, 4)), jnp.float32) for n in (8, 4, 4))
    one = jnp.ones((1, 8), jnp.int32)
    used = [att.used_heads(a[0], jnp.asarray(True), 2)[None] for a in (k, v)]
    near(att.attend(q, *used, one, 8, 4), att.plain_attention(q, k[:, :, :2], v[:, :, :2], one, 8))


@jax.jit
def attention_both_ways(q, k, v, d, segments, window):
    fast, pull_fast = jax.vjp(lambda *a: att.attend(*a, segments, window, 8), q, k, v)
    slow, pull_slow = jax.vjp(lambda *a: att.plain_attention(*a, segments, window), q, k, v)
    return (fast, *pull_fast(d)), (slow, *pull_slow(d))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.floats(0.1, 20))
def test_blockwise_attention_is_attention(seed, window, size):
    """Any documents, any window, logits from flat to sharp: output and all gradients of the plain softmax."""
    rng = np.random.default_rng(seed)
    q, d, k, v = (jnp.asarray(rng.normal(size=(2, 24, n, 4)), jnp.float32) for n in (6, 6, 3, 3))
    segments = jnp.asarray(np.cumsum(rng.random((2, 24)) < rng.random(), axis=1), jnp.int32)
    fast, slow = attention_both_ways(q * size, k, v, d, segments, window)
    for a, b in zip(fast, slow, strict=True):
        assert np.abs(a - b).max() < 3e-6 * (1 + size) * max(1, np.abs(b).max())  # gradients grow with the queries


def test_attention_refuses_a_block_that_does_not_divide():
    x = jnp.zeros((1, 24, 1, 4))
    with pytest.raises(UsageError, match='sequence of 24 .* blocks of 16'):
        att.attend(x, x, x, jnp.ones((1, 24), jnp.int32), 24, 16)
    with pytest.raises(UsageError, match='did you mean split'):
        att.rotate(x, att.rope_angles(24, 4, 1e4, 1.0), 'splits')


# routing and quantile balancing


@pytest.mark.parametrize('case', 'abc')
def test_routing_published(qb, case):
    logits, bias, valid, k = (qb[f'{case}/{n}'] for n in ('logits', 'bias', 'valid', 'k'))
    routes = routing.route(logits, bias, valid, int(k))
    assert (routes.experts == qb[f'{case}/selected']).all()
    near(routes.weights, jnp.where(valid[:, None], qb[f'{case}/weights'], 0))
    near(routes.threshold, qb[f'{case}/np_alpha'])
    load = routing.expert_load(routes.experts, valid, logits.shape[1])
    assert (load == qb[f'{case}/routing_counts']).all()
    share = np.asarray(load[load > 0]) / load.sum()
    assert abs(-(share * np.log(share + 1e-6)).sum() - qb[f'{case}/routing_entropy']) < 2e-6  # their guard of 1e-6


@pytest.mark.parametrize('case', 'abc')
def test_quantile_levels_lie_in_the_bracket(qb, case):
    """Within one bin of the levels that exactly n margins meet; padding's margins are made enormous first."""
    logits, valid, alpha = (qb[f'{case}/{n}'] for n in ('logits', 'valid', 'np_alpha'))
    margin = jnp.where(valid[:, None], logits - alpha[:, None], 1e9)
    levels = routing.quantile_levels(margin, valid, int(qb[f'{case}/k']))
    inside = np.asarray(margin)[np.asarray(valid)]
    width = np.ptp(inside) / 10_000
    assert (levels >= qb[f'{case}/np_beta_low'] - width).all() and (levels <= qb[f'{case}/np_beta_high'] + width).all()


def test_quantile_bias_is_the_older_rule_but_for_a_bin(qb):
    """Marin's top-k estimator takes one of the margins; where the share is a whole number, that is our level."""
    logits, bias, valid, k = (qb[f'b/{n}'] for n in ('logits', 'bias', 'valid', 'k'))
    mine = routing.quantile_bias(logits, bias, valid, int(k))
    gap = (qb['b/np_beta_high'] - qb['b/np_beta_low']).max()
    assert np.abs(mine - qb['b/rule_next_bias_1']).max() < gap + np.ptp(logits - qb['b/np_alpha'][:, None]) / 10_000


@pytest.mark.parametrize('case', 'abc')
def test_balancing_converges_as_published(qb, case):
    """Ten rounds on frozen logits from the published start: no expert is more than three tokens above its share."""
    logits, valid, k = qb[f'{case}/logits'], qb[f'{case}/valid'], int(qb[f'{case}/k'])
    bias = qb[f'{case}/iter_bias'][0]
    step = jax.jit(routing.quantile_bias, static_argnums=3)
    load = jax.jit(lambda b: routing.expert_load(routing.route(logits, b, valid, k).experts, valid, logits.shape[1]))
    published = qb[f'{case}/iter_counts']
    assert (load(bias) == published[0]).all()
    for _ in range(len(published) - 1):
        bias = step(logits, bias, valid, k)

    share = float(load(bias).mean())
    assert published[0].max() > 3 * share and load(bias).max() <= share + 3 and published[-1].max() <= share + 3


EIGHT = """
import os
os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'
import jax, jax.numpy as jnp, numpy as np
from functools import partial
from jax.sharding import Mesh, PartitionSpec as P
from ladderbook.model.routing import quantile_bias
rng = np.random.default_rng(0)
logits = jnp.asarray(rng.normal(size=(512, 24)) * 2 + rng.normal(size=24), jnp.float32)
bias, valid = jnp.asarray(rng.normal(size=24), jnp.float32), jnp.asarray(rng.random(512) < 0.8).at[:64].set(False)
mesh = Mesh(np.array(jax.devices()), ('data',))
spread = jax.jit(jax.shard_map(partial(quantile_bias, top_k=4, axis_name='data'), mesh=mesh,
                               in_specs=(P('data'), P(), P('data')), out_specs=P()))
one = jax.jit(partial(quantile_bias, top_k=4))(logits, bias, valid)
assert len(jax.devices()) == 8 and (spread(logits, bias, valid) == one).all() and jnp.abs(one).max() > 0.1
assert (spread(logits, bias, valid & False) == bias).all()
"""


def test_balancing_over_eight_devices_equals_one():
    """To the bit, with one device holding nothing but padding."""
    done = subprocess.run([sys.executable, '-c', EIGHT], env=dict(os.environ), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


# experts

T, E, K, L, F = 40, 10, 3, 8, 6


@jax.jit
def experts_both_ways(x, weights, w, experts, valid):
    weights, d = jnp.where(valid[:, None], weights, 0), jnp.cos(jnp.arange(T * L, dtype=jnp.float32)).reshape(T, L)
    load = routing.expert_load(experts, valid, E)
    blocks = exp.dropless_rows(experts, valid, load, exp.block_size(T, E, K))
    buffers = exp.capacity_rows(experts, valid, load, 7)

    def run(f):
        y, pull = jax.vjp(f, x, weights, w)
        return y, *pull(d)

    def masked(kept, a):
        return jnp.where(kept, a, 0)

    return (
        run(lambda x, a, w: exp.dropless_experts(x, *blocks, a, w)),
        run(lambda x, a, w: exp.plain_experts(x, experts, masked(valid[:, None], a), w)),
        run(lambda x, a, w: exp.capacity_experts(x, buffers, a, w)),
        run(lambda x, a, w: exp.plain_experts(x, experts, masked(buffers.kept, a), w)),
        buffers.kept,
    )


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0, 30), st.floats(0, 1))
def test_expert_paths_for_any_routing(seed, skew, share):
    """From even to all on one expert, from no padding to nothing else: dropless is exact, buffers keep the first 7."""
    rng = np.random.default_rng(seed)

    def draw(*s):
        return jnp.asarray(rng.normal(size=s), jnp.float32)

    x, weights, w = draw(T, L), draw(T, K), exp.ExpertWeights(draw(E, L, F), draw(E, L, F), draw(E, F, L))
    scores = rng.normal(size=(T, E)) + skew * rng.normal(size=E)
    experts, valid = jnp.asarray(np.argsort(-scores, 1)[:, :K]), jnp.asarray(rng.random(T) < share)
    dropless, exact, buffered, partial_sum, kept = experts_both_ways(x, weights, w, experts, valid)
    for pair in ((dropless, exact), (buffered, partial_sum)):
        for a, b in zip(*map(jax.tree.leaves, pair), strict=True):
            assert np.abs(a - b).max() <= 3e-5 * max(1, np.abs(b).max())
    flat, seen = np.where(np.asarray(valid)[:, None], experts, E), np.zeros(E + 1, int)
    for t, j in np.ndindex(T, K):
        assert kept[t, j] == (flat[t, j] < E and seen[flat[t, j]] < 7)
        seen[flat[t, j]] += 1


def test_sorting_in_two_integers_is_the_same():
    """Too many experts times assignments for one packed integer: the order does not change."""
    expert = jnp.asarray(np.random.default_rng(0).integers(0, 5, 64))
    for a, b in zip(exp.by_expert(expert, 5), exp.by_expert(expert, 2**31), strict=True):
        assert (a == b).all()


@pytest.mark.parametrize('tokens, k', [(2048, 2), (4096, 2)])
def test_dropless_costs_at_most_three_times(tokens, k):
    """Multiplied rows, by the formula, at 96 experts; the compiler's own count is in the chapter."""
    b = exp.block_size(tokens, 96, k)
    blocks = jax.eval_shape(
        lambda e, v, n: exp.dropless_rows(e, v, n, b)[1],
        *(jax.ShapeDtypeStruct(*s) for s in (((tokens, k), 'int32'), ((tokens,), 'bool'), ((96,), 'int32'))),
    ).shape[0]
    assert blocks * b <= 3 * 96 * exp.capacity(tokens, 96, k, 1.15)


def test_capacity_is_exact_where_it_divides():
    assert exp.capacity(4096, 96, 2, 1.25) == 107 and exp.capacity(4096, 64, 2, 1.25) == 160
    assert exp.capacity(4, 2, 1, 100.0) == 4 and exp.capacity(46_137_344, 384, 8, 1.15) == 1_105_374


# the model


SIZES = ('layers', 'expert_width', 'latent_width', 'shared_width', 'shared_experts', 'norm_rank', 'sconv_taps')


@settings(max_examples=30, deadline=None)
@given(
    st.fixed_dictionaries({name: st.integers(1, 9) for name in SIZES}),
    st.sampled_from([(2, 1), (2, 2), (4, 2)]),
    st.sets(st.sampled_from(('key', 'attention', 'mlp'))),
)
def test_table_counts_what_the_recipe_counts(sizes, kv, sites):
    kv = dict(kv_heads_local=kv[0], kv_heads_global=kv[1])
    spec = dataclasses.replace(TINY, **sizes, **kv, sconv_sites=tuple(sorted(sites)))
    assert sum(leaf.size for leaf in table(spec).values()) == parameters(spec)['total']
    model = nnx.eval_shape(lambda: LM(spec, nnx.Rngs(0)))
    state = nnx.to_flat_state(nnx.state(model, (nnx.Param, RouterBias)))
    found = {'.'.join(p): (v.shape, str(v.dtype)) for p, v in state}
    assert found == {p: (leaf.shape, leaf.dtype) for p, leaf in table(spec).items()}


def test_initial_norms_are_those_of_the_recipe():
    """Every drawn leaf has the Frobenius norm that the recipe predicts (and that Marin logged, for the hero)."""
    spec = dataclasses.replace(TINY, width=64, vocab=512)
    model = nnx.jit(LM, static_argnums=0)(spec, nnx.Rngs(1))
    drawn = 0
    for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        leaf = table(spec)['.'.join(path)]
        if leaf.init == 'normal':
            norm = np.linalg.norm(np.asarray(v[...], np.float64))
            assert abs(norm / initial_norm(spec, leaf.size) - 1) < 4 / (2 * leaf.size) ** 0.5, path
            drawn += 1
    assert drawn == 23


def test_initial_values_do_not_depend_on_the_other_leaves():
    make = nnx.jit(LM, static_argnums=0)
    plain = make(dataclasses.replace(TINY, sconv_sites=(), norm_rank=8), nnx.Rngs(3))
    model = make(TINY, nnx.Rngs(3))
    for part in ('query', 'output', 'value'):
        assert (getattr(model.blocks.attention, part)[...] == getattr(plain.blocks.attention, part)[...]).all()
    assert (make(TINY, nnx.Rngs(4)).head[...] != model.head[...]).all()


def plain_lm(model, spec, tokens, segments):
    """The model again, with nothing but matrix products and softmax: no blocks, no buffers, no scan, no remat."""

    def norm(x, p):
        x = p.gain[...] * x / jnp.sqrt((x * x).mean(-1, keepdims=True) + spec.norm_eps)
        return x * jax.nn.sigmoid(jax.nn.silu(x @ p.down[...]) @ p.up[...])

    def conv(x, taps):
        before = [jnp.roll(x, j, 1) * ((jnp.roll(segments, j, 1) == segments) & (jnp.arange(x.shape[1]) >= j))[..., None]
                  for j in range(taps.shape[0])]  # fmt: skip
        return sum(taps[j] * b for j, b in enumerate(before))

    x = norm(model.embedding[...][tokens], model.embedding_norm)
    graph, stack = nnx.split(model.blocks)
    for i in range(spec.layers):
        b = nnx.merge(graph, jax.tree.map(lambda a, i=i: a[i], stack))
        a, w = norm(x, b.attention_norm), b.attention

        def heads(y):
            return y.reshape(*y.shape[:2], -1, spec.head_dim)

        q, k, v = heads(a @ w.query[...]), heads(conv(a @ w.key[...], w.taps[...])), heads(a @ w.value[...])
        k, v = k[:, :, : spec.kv_heads(i)], v[:, :, : spec.kv_heads(i)]
        q, k = (y / jnp.sqrt((y * y).mean(-1, keepdims=True) + spec.qk_eps) for y in (q, k))
        if not spec.is_global(i):
            angles = att.rope_angles(tokens.shape[1], spec.head_dim, spec.rope_theta, spec.rope_fraction)
            q, k = att.rotate(q, angles, spec.rope_pairing), att.rotate(k, angles, spec.rope_pairing)
        y = att.plain_attention(q * spec.qk_multiplier, k, v, segments, spec.reach(i))
        v = jnp.repeat(v, spec.heads // v.shape[2], 2)
        y = y - (y * v).sum(-1, keepdims=True) / ((v * v).sum(-1, keepdims=True) + 1e-6) * v
        y = y * 2 * jax.nn.sigmoid(a @ w.gate[...])[..., None]
        x = x + conv(y.reshape(*x.shape[:2], -1) @ w.output[...], b.attention_taps[...])
        m, w = norm(x, b.mlp_norm).reshape(-1, spec.width), b.moe
        logits = m @ w.router[...]
        chosen = jnp.argsort(-(logits + b.router_bias[...]), axis=1)[:, : spec.top_k]
        s = jax.nn.sigmoid(jnp.take_along_axis(logits, chosen, 1)) * (segments.reshape(-1, 1) > 0)
        h = m @ w.down[...]
        h = w.gain[...] * h / jnp.sqrt((h * h).mean(-1, keepdims=True) + spec.norm_eps)
        ew = exp.ExpertWeights(w.expert_gate[...], w.expert_up[...], w.expert_down[...])
        y = exp.plain_experts(h, chosen, 2.5 * s / (s.sum(1, keepdims=True) + 1e-9), ew) @ w.up[...]
        for g, u, d in zip(w.shared_gate[...], w.shared_up[...], w.shared_down[...], strict=True):
            y = y + (jax.nn.silu(m @ g) * (m @ u)) @ d
        x = x + conv(y.reshape(x.shape), b.mlp_taps[...])
    return norm(x, model.final_norm)


@pytest.fixture(scope='module')
def tiny():
    """A model away from its initial point: gates open, taps mixed, biases set; with tokens, segments and padding."""
    rng = np.random.default_rng(0)
    model = nnx.jit(LM, static_argnums=0)(TINY, nnx.Rngs(0))
    graph, state = nnx.split(model)
    state = jax.tree.map(lambda a: a + 0.1 * jnp.asarray(rng.normal(size=a.shape), a.dtype), state)
    tokens = jnp.asarray(rng.integers(0, TINY.vocab, (2, 32)), jnp.int32)
    segments = jnp.asarray(np.repeat([1, 2, 0, 1, 2], [20, 8, 4, 13, 19]).reshape(2, 32), jnp.int32)
    return nnx.merge(graph, state), tokens, segments


@nnx.jit(static_argnames='compute')
def value_and_gradient(model, tokens, segments, compute):
    """Hidden states of valid tokens, telemetry and the gradient of a sum of squares; the plain model for compute None."""

    def total(model):
        out = plain_lm(model, TINY, tokens, segments) if compute is None else None
        out, told = (out, None) if compute is None else hidden(model, tokens, segments, compute)
        out = out.astype(jnp.float32) * (segments > 0)[..., None]
        return (out**2 * jnp.cos(jnp.arange(TINY.width))).sum(), (out, told)

    gradient, (out, told) = nnx.grad(total, has_aux=True)(model)
    return out, told, gradient


@pytest.fixture(scope='module')
def truth(tiny):
    return value_and_gradient(*tiny, None)


def gradients_agree(a, b, tolerance):
    for (path, x), (_, y) in zip(nnx.to_flat_state(a), nnx.to_flat_state(b), strict=True):
        worst = np.abs(np.asarray(x[...], np.float32) - y[...]).max()
        assert worst <= tolerance * max(np.abs(y[...]).max(), 1e-3), (path, worst)


@pytest.fixture(scope='module')
def exact(tiny):
    return value_and_gradient(*tiny, Compute(attention_block=8, dropless=True))


def test_model_is_the_plain_model(exact, truth):
    """Output and the gradient of every parameter; all but the head (not used here) have one."""
    out, told, gradient = exact
    near(out, truth[0], 2e-5)
    gradients_agree(gradient, truth[2], 2e-4)
    still = [path for path, g in nnx.to_flat_state(gradient) if not np.abs(g[...]).max() > 0]
    assert still == [('head',)]
    assert (told.dropped == 0).all() and (told.load.sum(1) == 60 * TINY.top_k).all()
    assert (told.entropy > 0).all() and (told.entropy < np.log(8)).all()


def test_computing_again_changes_no_gradient(tiny, exact):
    again = value_and_gradient(*tiny, Compute(attention_block=8, dropless=True, remat=True))
    near(again[0], exact[0], 1e-6)
    gradients_agree(again[2], exact[2], 1e-5)
    assert (again[1].next_bias == exact[1].next_bias).all()


def test_bfloat16_is_the_same_model_coarsely(tiny, truth):
    """Two digits of the hidden state; gradients in float32, of nearly the same direction."""
    out, told, gradient = value_and_gradient(*tiny, Compute(attention_block=8, dropless=True, dtype='bfloat16'))
    error, size = (np.linalg.norm(np.asarray(a), axis=-1)[np.asarray(tiny[2]) > 0] for a in (out - truth[0], truth[0]))
    assert np.median(error / size) < 0.01
    assert np.quantile(error / size, 0.9) < 0.02  # a token whose experts change may be further off

    def flat(g):
        return np.concatenate([np.asarray(a, np.float32).ravel() for a in jax.tree.leaves(g)])

    mine, theirs = flat(gradient), flat(truth[2])
    assert mine @ theirs > 0.99 * np.linalg.norm(mine) * np.linalg.norm(theirs)
    assert all(a.dtype == jnp.float32 for a in jax.tree.leaves(gradient)) and told.next_bias.dtype == jnp.float32


def test_padding_is_inert_and_drops_are_counted(tiny, exact):
    """Other tokens under the padding: same hidden states and telemetry to the bit, with buffers that do overflow."""
    model, tokens, segments = tiny
    run = nnx.jit(partial(hidden, compute=Compute(attention_block=8)))
    valid, other = np.asarray(segments) > 0, jnp.where(segments > 0, tokens, 63 - tokens)
    (a, told), (b, told_b) = run(model, tokens, segments), run(model, other, segments)
    assert (np.asarray(a)[valid] == np.asarray(b)[valid]).all() and (
        np.asarray(a)[~valid] != np.asarray(b)[~valid]
    ).any()
    assert all((x == y).all() for x, y in zip(told, told_b, strict=True))
    over = np.maximum(told.load - exp.capacity(64, 8, 2, 1.25), 0).sum(1)
    assert (told.dropped == over).all() and over.sum() > 0
    assert (told.load[0] == exact[1].load[0]).all()


def test_groups_for_partition(tiny):
    """optax.partition takes the labels, and each group moves its own parameters and no others."""
    params = nnx.state(tiny[0], nnx.Param)
    labels = groups(params)
    tx = optax.partition({g: optax.sgd(float(i + 1)) for i, g in enumerate(GROUPS)}, labels)
    ones = jax.tree.map(jnp.ones_like, params)
    moved, _ = tx.update(ones, tx.init(params), params)
    for path, v in nnx.to_flat_state(moved):
        leaf = table(TINY)['.'.join(path)]
        assert (v[...] == -1.0 - GROUPS.index(leaf.group)).all(), path
    flat = {'.'.join(p): v for p, v in nnx.to_flat_state(labels)}
    decayed = [p for p, v in flat.items() if 'adam_decay' in jax.tree.leaves(v)]
    assert sorted(decayed) == ['blocks.attention.gate', 'blocks.moe.router']


def test_refusals(tiny):
    with pytest.raises(UsageError, match="no dtype .* 'float16'; did you mean bfloat16"):
        Compute(dtype='float16')
    with pytest.raises(UsageError, match='attention_block is 0'):
        Compute(attention_block=0)
    with pytest.raises(UsageError, match="no parameter is called 'blocks.attention.keys'"):
        groups(nnx.State({'blocks': {'attention': {'keys': nnx.Param(jnp.ones(2))}}}))
