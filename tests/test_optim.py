"""Schedule, optimiser and loss: against published numbers, float64 references, and the inputs they refuse."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ladderbook.errors import UsageError
from ladderbook.recipe.rules import august, changed, make
from ladderbook.train.loss import cross_entropy, token_losses
from ladderbook.train.optim import QUINTIC, by_hyperball, hyperball, newton_schulz, optimizer, transformations
from ladderbook.train.schedule import schedule

MICRO = dict(
    layers=4, heads=2, head_dim=32, kv_heads_local=2, kv_heads_global=1, experts=24, top_k=2, sequence=256, window=128,
    vocab=4096, norm_rank=16, batch=8,
)  # fmt: skip
PEAK = 0.02
SHAPES = ('square', 'wide', 'tall', 'experts_tall')


@pytest.fixture(scope='module')
def optim(root):
    with np.load(root / 'tests/data/marin/optim.npz') as z:
        return dict(z)


@pytest.fixture(scope='module')
def micro():
    return august(64, 2048 * 60, **MICRO)


def f32(x):
    return jnp.asarray(x, jnp.float32)


def lengths(x):
    return np.linalg.norm(np.asarray(x, np.float64), axis=(-2, -1))


def walk(tx, params, gradients):
    """Parameters after each gradient, and the last state."""
    step, state, path = jax.jit(tx.update), tx.init(params), []
    for g in gradients:
        updates, state = step(g, state, params)
        params = optax.apply_updates(params, updates)
        path.append(params)
    return path, state


# schedule


def test_schedule_published(root):
    table = json.loads((root / 'tests/data/marin/schedule.json').read_text())['values']
    assert len(table) == 4
    for name, values in table.items():
        peak, steps = float(name.split('/')[0]), int(name.split('/')[1])
        rate = schedule(peak, steps, int(0.01 * steps))
        for step, wanted in values.items():
            assert float(rate(int(step))) == pytest.approx(wanted, rel=2e-6), (name, step)


def test_schedule_of_recipes(micro):
    for recipe in (micro, make('delphi-v2', 512, 10**9), make('moe-v1', 512, 10**9)):
        rate = schedule(recipe.matrix_lr, recipe.steps, recipe.warmup_steps, recipe.final_fraction, recipe.decay_steps)
        last = recipe.matrix_lr * recipe.final_fraction
        assert float(rate(recipe.steps)) == pytest.approx(last, rel=1e-5, abs=1e-9)
        assert float(rate(recipe.steps - recipe.decay_steps)) == pytest.approx(recipe.matrix_lr, rel=1e-6)


# Newton-Schulz and the hyperball


def test_published_coefficients(optim):
    assert np.array_equal(np.float32(QUINTIC), np.float32(optim['quintic']))


@pytest.mark.parametrize('shape', ['square', 'wide', 'tall'])
def test_newton_schulz_published(optim, shape):
    gradient = f32(optim[f'{shape}/grads_q8'][0]) / 256
    assert np.abs(newton_schulz(gradient, dtype='float32') - optim[f'{shape}/ns_fp32']).max() < 2e-6
    assert np.abs(newton_schulz(gradient) - optim[f'{shape}/ns_bf16']).max() < 5e-2


@pytest.mark.parametrize('shape', SHAPES)
@pytest.mark.parametrize('block_bytes', [None, 4 * 24 * 16])
def test_muonh_published(optim, micro, shape, block_bytes):
    recipe = dataclasses.replace(micro, matrix_lr=PEAK, warmup_steps=0, decay_steps=1, steps=2**20, tokens=2**31)
    params = {'w': f32(optim[f'{shape}/param_q8']) / 256}
    gradients = [{'w': f32(g) / 256} for g in optim[f'{shape}/grads_q8']]
    for dtype in ('float32', 'bfloat16'):
        path, state = walk(optimizer(recipe, {'w': 'muonh'}, dtype, block_bytes), params, gradients)
        for step, found in enumerate(path):
            assert np.abs(found['w'] - optim[f'{shape}/muonh_params'][step]).max() < 1.2e-3
            if dtype == 'float32' and shape != 'experts_tall':
                assert np.abs(found['w'] - optim[f'{shape}/muonh_linear_params'][step]).max() < 2e-6
    moments = [x for x in jax.tree.leaves(state) if x.shape == params['w'].shape]
    assert len(moments) == 1
    assert np.abs(moments[0] - optim[f'{shape}/muon_momentum_last']).max() < 2e-6


@pytest.mark.parametrize('shape', SHAPES)
def test_muon_direction_published(optim, micro, shape):
    gradients = [f32(g) / 256 for g in optim[f'{shape}/grads_q8']]
    rows, columns = gradients[0].shape[-2:]
    trace, state = optax.trace(micro.momentum, nesterov=True), optax.trace(0.0).init(gradients[0])
    for gradient, wanted in zip(gradients, optim[f'{shape}/muon_direction'], strict=True):
        u, state = trace.update(gradient, state)
        assert (
            np.abs(newton_schulz(u) * max(1, columns / rows) ** 0.5 - wanted).max()
            < 5e-2 * max(1, columns / rows) ** 0.5
        )


@pytest.mark.parametrize('shape', SHAPES)
def test_adamh_published(optim, micro, shape):
    recipe = dataclasses.replace(
        micro, matrix_lr=PEAK, warmup_steps=0, decay_steps=1, steps=2**20, tokens=2**31, beta2=0.95, epsilon=6.04e-15
    )
    gradients = [{'w': f32(g) / 256} for g in optim[f'{shape}/grads_q8']]
    path, state = walk(optimizer(recipe, {'w': 'adamh'}), {'w': f32(optim[f'{shape}/param_q8']) / 256}, gradients)
    for found, wanted in zip(path, optim[f'{shape}/adamh_params'], strict=True):
        assert np.abs(found['w'] - wanted).max() < 2e-6
    mu, nu = (x for x in jax.tree.leaves(state) if x.shape == path[0]['w'].shape)
    assert np.abs(mu - optim[f'{shape}/adamh_mu_last']).max() < 2e-6
    assert np.abs(nu - optim[f'{shape}/adamh_nu_last']).max() < 2e-6


# few shapes, many numbers: every new shape is a new program to compile
STACKS = st.sampled_from([(1, 7), (9, 1), (1, 1), (2, 3, 5, 8), (3, 6, 6)])
both_ways = jax.jit(
    lambda x, block_bytes: [
        newton_schulz(x, dtype='float32', block_bytes=block_bytes),
        jnp.swapaxes(newton_schulz(jnp.swapaxes(x, -1, -2), dtype='float32', block_bytes=block_bytes), -1, -2),
    ],
    static_argnums=1,
)
ball = jax.jit(hyperball)


@settings(max_examples=20, deadline=None)
@given(STACKS, st.integers(0, 2**31), st.floats(1e-3, 1e6), st.sampled_from([None, 300]))
def test_newton_schulz_is_a_polynomial_of_singular_values(shape, seed, scale, block_bytes):
    x = np.float32(scale * np.random.default_rng(seed).normal(size=shape))
    u, s, vt = np.linalg.svd(np.float64(x), full_matrices=False)
    s = s / (np.sqrt((s**2).sum(-1, keepdims=True)) + 1e-8)
    for a, b, c in QUINTIC:
        s = a * s + b * s**3 + c * s**5
    for found in both_ways(f32(x), block_bytes):
        assert found.shape == x.shape
        assert np.abs(found - (u * s[..., None, :]) @ vt).max() < 1e-4


@settings(max_examples=30, deadline=None)
@given(STACKS, st.integers(0, 2**31), st.floats(1e-5, 0.5), st.sampled_from([1e-8, 1.0, 1e6]))
def test_hyperball_against_float64(shape, seed, rate, scale):
    draw = np.random.default_rng(seed)
    w, u = (np.float32(draw.normal(size=shape) * k) for k in (1, scale))
    norm = lengths(w)[..., None, None]
    moved = np.float64(w) - rate * norm * np.float64(u) / lengths(u)[..., None, None]
    wanted = moved * norm / lengths(moved)[..., None, None]
    assert np.abs(ball(f32(w), f32(u), rate) - wanted).max() < 1e-5 * norm.max()


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('group', ['muonh', 'adamh', 'adam', 'adam_decay'])
def test_zeros_stay_numbers(micro, group, dtype):
    recipe = changed(micro, gate_router_decay=0.02, warmup_steps=0)
    draw = np.random.default_rng(0)
    w = f32(draw.normal(size=(3, 6, 4))).at[0].set(0)
    g = f32(draw.normal(size=(3, 6, 4))).at[1].set(0)
    tiny = g.at[2].multiply(1e-25)
    path, _ = walk(optimizer(recipe, {'w': group}, dtype), {'w': w}, [{'w': g}, {'w': tiny}, {'w': 0 * g}])
    for found in path:
        assert np.isfinite(found['w']).all()
    if group in ('muonh', 'adamh'):
        assert not np.any(path[-1]['w'][0])
        assert np.array_equal(path[-1]['w'][1], w[1])


# a whole step


SIZES = {
    'experts': (2, 3, 8, 12), 'tall': (2, 12, 8), 'head': (12, 40), 'embedding': (40, 12), 'gain': (2, 12),
    'router': (2, 12, 3), 'gate': (2, 12, 2),
}  # fmt: skip
LABELS = dict(
    experts='muonh', tall='muonh', head='adamh', embedding='adam', gain='adam', router='adam_decay', gate='adam_decay'
)


class Reference:
    """The equations of the chapter in float64, one matrix at a time."""

    def __init__(self, recipe, params):
        self.r, self.n = recipe, 0
        self.w = {k: np.array(v, np.float64) for k, v in params.items()}
        self.m = {k: np.zeros_like(v) for k, v in self.w.items()}
        self.v = {k: np.zeros_like(v) for k, v in self.w.items()}

    def rate(self, peak):
        n, r = self.n, self.r
        if n < r.warmup_steps:
            return peak * n / r.warmup_steps
        return peak * (1 - (1 - r.final_fraction) * (n - r.warmup_steps) / (r.steps - r.warmup_steps))

    def adam(self, name, g):
        r, n = self.r, self.n + 1
        self.m[name] = r.beta1 * self.m[name] + (1 - r.beta1) * g
        self.v[name] = r.beta2 * self.v[name] + (1 - r.beta2) * g**2
        return (self.m[name] / (1 - r.beta1**n)) / (np.sqrt(self.v[name] / (1 - r.beta2**n)) + r.epsilon)

    def muon(self, name, g):
        self.m[name] = self.r.momentum * self.m[name] + g
        direction = g + self.r.momentum * self.m[name] if self.r.nesterov else self.m[name]
        out = np.zeros_like(g)
        for i in np.ndindex(g.shape[:-2]):
            x = direction[i] / (np.linalg.norm(direction[i]) + self.r.muon_epsilon)
            for a, b, c in QUINTIC[: self.r.newton_schulz_steps]:
                gram = x @ x.T
                x = a * x + (b * gram + c * gram @ gram) @ x
            out[i] = x
        return out

    def ball(self, name, u):
        w = self.w[name]
        for i in np.ndindex(w.shape[:-2]):
            norm = np.linalg.norm(w[i])
            moved = w[i] - self.rate(self.r.matrix_lr) * norm * u[i] / max(np.linalg.norm(u[i]), 1e-10)
            w[i] = moved * norm / max(np.linalg.norm(moved), 1e-10)

    def step(self, gradients):
        gradients = {k: np.float64(g) for k, g in gradients.items()}
        norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
        for name, g in gradients.items():
            g = g if self.r.clip is None or norm < self.r.clip else g * self.r.clip / norm
            group = LABELS[name]
            u = self.muon(name, g) if group == 'muonh' and self.r.optimizer == 'muonh' else self.adam(name, g)
            if group in ('muonh', 'adamh'):
                self.ball(name, u)
            else:
                decay = self.r.gate_router_decay * (1 - self.n / self.r.steps) if group == 'adam_decay' else 0
                self.w[name] -= self.rate(self.r.adam_lr) * (u + decay * self.w[name])
        self.n += 1


@pytest.mark.parametrize(
    'changes',
    [
        {},
        {'gate_router_decay': 0.02, 'nesterov': False, 'newton_schulz_steps': 3},
        {'clip': 0.5},
        {'optimizer': 'adamh'},
    ],
    ids=lambda c: '-'.join(c) or 'august',
)
def test_whole_step_against_float64(micro, changes):
    recipe = changed(micro, warmup_steps=2, **changes)
    draw = np.random.default_rng(3)
    params = {k: f32(draw.normal(size=s)) for k, s in SIZES.items()}
    reference = Reference(recipe, params)
    gradients = [{k: f32(draw.normal(size=s)) for k, s in SIZES.items()} for _ in range(6)]
    path, _ = walk(optimizer(recipe, LABELS, 'float32'), params, gradients)
    for g, found in zip(gradients, path, strict=True):
        reference.step(g)
        for name in SIZES:
            assert np.abs(found[name] - reference.w[name]).max() < 2e-5, name
    assert all(np.abs(path[-1][k] - params[k]).max() > 1e-3 for k in SIZES)


def test_norms_never_move(micro):
    recipe = changed(micro, gate_router_decay=0.02)
    draw = np.random.default_rng(4)
    params = {k: f32(draw.normal(size=s)) for k, s in SIZES.items()}
    gradients = ({k: f32(draw.normal(size=s)) for k, s in SIZES.items()} for _ in range(50))
    path, _ = walk(optimizer(recipe, LABELS), params, gradients)
    for name in ('experts', 'tall', 'head'):
        for found in path:
            assert np.abs(lengths(found[name]) / lengths(params[name]) - 1).max() < 1e-6, name


def test_decay_touches_gate_and_router_only(micro):
    draw = np.random.default_rng(5)
    params = {k: f32(draw.normal(size=s)) for k, s in SIZES.items()}
    gradients = [{k: f32(draw.normal(size=s)) for k, s in SIZES.items()} for _ in range(3)]
    ends = [
        walk(optimizer(changed(micro, warmup_steps=0, gate_router_decay=d), LABELS), params, gradients)[0][-1]
        for d in (0.0, 0.02)
    ]
    assert {k for k in SIZES if not np.array_equal(ends[0][k], ends[1][k])} == {'router', 'gate'}


def test_one_state_and_no_second_compile(micro):
    """The state keeps its shapes and dtypes, so that a compiled step takes what it gave."""
    tx = optimizer(micro, LABELS)
    params = {k: f32(np.ones(s)) for k, s in SIZES.items()}
    state = tx.init(params)
    _, after = jax.eval_shape(tx.update, params, state, params)
    described = [
        jax.tree.map(lambda x: (x.shape, str(x.dtype), x.weak_type), jax.eval_shape(lambda s: s, t))
        for t in (state, after)
    ]
    assert described[0] == described[1]


def test_refusals(micro):
    with pytest.raises(UsageError, match="no optimiser group 'muon'; expected one of muonh"):
        optimizer(micro, {'w': 'muon'})
    with pytest.raises(UsageError, match="'adamw' is on paper only"):
        transformations(make('delphi-v1', 512, 10**9))
    vector = {'w': jnp.ones(4)}
    tx = optimizer(micro, {'w': 'muonh'})
    with pytest.raises(UsageError, match='holds no matrix'):
        tx.update(vector, tx.init(vector), vector)
    with pytest.raises(UsageError, match='expected update'):
        tx = by_hyperball(schedule(0.1, 10, 1))
        tx.update({'w': jnp.ones((2, 2))}, tx.init({'w': jnp.ones((2, 2))}))


# loss


def loss_sums(hidden, head, targets, weights, z_loss, chunk, rows):
    def objective(hidden, head):
        nats, z, total = cross_entropy(hidden, head, targets, weights, z_loss, chunk, rows)
        return (nats + z) / total, (nats, z, total)

    return jax.value_and_grad(objective, (0, 1), has_aux=True)(hidden, head)


compiled = jax.jit(loss_sums, static_argnums=(4, 5, 6))
WAYS = [(None, None), (None, 9), (40, None)]


@pytest.mark.parametrize('way', WAYS, ids=str)
@pytest.mark.parametrize('name, z', [('none', 0.0), ('z1e-4', 1e-4), ('z1e-1', 1e-1)])
def test_loss_published(root, way, name, z):
    with np.load(root / 'tests/data/marin/ce.npz') as f:
        ce = dict(f)
    hidden, head, weights = f32(ce['hidden']).reshape(-1, 32), f32(ce['head']), f32(ce['weight']).reshape(-1)
    targets = jnp.asarray(ce['labels'], jnp.int32).reshape(-1)
    (mean, (nats, z_sum, total)), (by_hidden, by_head) = compiled(hidden, head, targets, weights, z, *way)
    assert float(mean) == pytest.approx(float(ce[f'mean_{name}']), rel=2e-6)
    assert float(nats + z_sum) == pytest.approx(float(ce[f'per_token_{name}'].sum()), rel=2e-6)
    assert float(total) == pytest.approx(float(weights.sum()), rel=1e-6)
    assert np.abs(by_hidden - ce[f'dhidden_{name}'].reshape(-1, 32)).max() < 2e-6
    assert np.abs(by_head - ce[f'dhead_{name}']).max() < 2e-6
    if name == 'none':
        found = token_losses(hidden, head, targets, *way) * weights
        assert np.abs(found - ce['per_token_none'].reshape(-1)).max() < 2e-6 * np.abs(ce['per_token_none']).max()


@jax.jit
def every_way(hidden, head, targets, weights):
    ways = (None, None), (None, 4), (1, None), (head.shape[1] - 1, None)
    return [
        (token_losses(hidden, head, targets, *way), loss_sums(hidden, head, targets, weights, 1e-3, *way))
        for way in ways
    ]


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([(13, 3, 17), (1, 1, 2)]), st.integers(0, 2**31), st.floats(0.1, 60.0))
def test_every_way_is_the_same_loss(shape, seed, scale):
    """Large logits included: exponentials never overflow, whichever slice holds the largest."""
    draw, (tokens, width, vocabulary) = np.random.default_rng(seed), shape
    hidden, head = f32(draw.normal(size=(tokens, width)) * scale), f32(draw.normal(size=(width, vocabulary)))
    targets = jnp.asarray(draw.integers(0, vocabulary, tokens), jnp.int32)
    weights = f32(draw.integers(0, 2, tokens)).at[0].set(1)
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64)
    top = logits.max(-1)
    wanted = top + np.log(np.exp(logits - top[:, None]).sum(-1)) - logits[np.arange(tokens), np.asarray(targets)]
    results = every_way(hidden, head, targets, weights)
    for found, _ in results:
        assert np.abs(found - wanted).max() < 3e-6 * (1 + np.abs(logits).max())
    # A logit is rounded to 2^-24 of its size, a probability is then off by as much, and a gradient is the other factor
    # times probabilities.
    rounding = 2.0**-23 * np.abs(logits).max() * max(np.abs(hidden).max(), np.abs(head).max())
    for _, other in results[1:]:
        for a, b in zip(jax.tree.leaves(results[0][1]), jax.tree.leaves(other), strict=True):
            assert np.abs(a - b).max() <= 1e-5 * (1 + np.abs(a).max()) + rounding


@pytest.mark.parametrize('way', [(None, None), (None, 5), (7, None)], ids=str)
def test_masked_rows_hold_anything(way):
    draw = np.random.default_rng(6)
    hidden, head = f32(draw.normal(size=(12, 4))), f32(draw.normal(size=(4, 20)))
    targets, weights = jnp.asarray(draw.integers(0, 20, 12), jnp.int32), f32(np.arange(12) % 3 > 0)
    spoiled = jnp.where((weights == 0)[:, None], jnp.asarray([jnp.nan, jnp.inf, -jnp.inf, 1e38]), hidden)
    strange = jnp.where(weights == 0, jnp.asarray(draw.integers(-(2**31), 2**31 - 1, 12), jnp.int32), targets)
    clean = compiled(hidden, head, targets, weights, 1e-3, *way)
    dirty = compiled(spoiled, head, strange, weights, 1e-3, *way)
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
        assert np.array_equal(a, b)
    nats, z, total = cross_entropy(spoiled, head, strange, jnp.zeros(12), 1e-3, *way)
    assert (float(nats), float(z), float(total)) == (0, 0, 0)


def test_bfloat16_operands():
    """bf16 operands, fp32 sums: close to the fp32 loss of the same rounded numbers, gradients in the types given."""
    draw = np.random.default_rng(7)
    hidden = jnp.asarray(draw.normal(size=(64, 16)), jnp.bfloat16)
    head = f32(draw.normal(size=(16, 100))).astype(jnp.bfloat16).astype(jnp.float32)
    targets, weights = jnp.asarray(draw.integers(0, 100, 64), jnp.int32), jnp.ones(64)
    (exact, _), wanted = compiled(hidden.astype(jnp.float32), head, targets, weights, 1e-4, None, None)
    for way in ((None, None), (None, 10), (30, None)):
        (found, _), grads = compiled(hidden, head, targets, weights, 1e-4, *way)
        assert float(found) == pytest.approx(float(exact), rel=1e-5)
        assert grads[0].dtype == jnp.bfloat16 and grads[1].dtype == jnp.float32
        for a, b in zip(grads, wanted, strict=True):
            assert np.abs(a.astype(jnp.float32) - b).max() < 0.01 * np.abs(b).max()


def test_loss_memory():
    """What slices and blocks are for, by the compiler's own count."""
    shapes = [jax.ShapeDtypeStruct(s, d) for s, d in (((1024, 16), 'float32'), ((16, 2048), 'float32'))]
    shapes += [jax.ShapeDtypeStruct((1024,), d) for d in ('int32', 'float32')]
    used = {}
    for way in ((None, None), (None, 128), (256, None)):
        program = jax.jit(lambda *a, way=way: loss_sums(*a, 1e-4, *way))
        used[way] = program.lower(*shapes).compile().memory_analysis().temp_size_in_bytes
    assert used[None, None] >= 4 * 1024 * 2048
    assert used[None, 128] < used[None, None] / 4
    assert used[256, None] < used[None, None] / 4


def test_loss_refusals():
    x = jnp.ones((2, 3)), jnp.ones((3, 5)), jnp.zeros(2, jnp.int32), jnp.ones(2)
    for way, message in (((0, None), 'chunk is 0'), ((None, -1), 'rows is -1'), ((2, 2), 'exclude each other')):
        with pytest.raises(UsageError, match=message):
            cross_entropy(*x, 0.0, *way)
