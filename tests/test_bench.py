"""The benchmarks measure what they say: equal work on both sides, time counted once, a failing side that says why.

Nothing here is timed.
"""

import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent / 'bench'))

import arm  # noqa: E402
import hotspots  # noqa: E402
import measure  # noqa: E402
import ragged  # noqa: E402
import replay  # noqa: E402
from ladderbook.model import experts as ours  # noqa: E402


def case(T=40, L=8, F=6, E=7, k=3):
    rng = np.random.default_rng(3)
    x, gate, up, down, score, weights = (
        jnp.asarray(0.5 * rng.standard_normal(shape), jnp.float32)
        for shape in ((T, L), (E, L, F), (E, L, F), (E, F, L), (T, E), (T, k))
    )
    chosen, valid = jax.lax.top_k(score, k)[1], jnp.arange(T) < T - 5
    load = jnp.bincount(chosen[: T - 5].reshape(-1), length=E).astype(jnp.int32)
    return x, chosen, weights, valid, load, ours.ExpertWeights(gate, up, down)


def test_ragged_side_computes_the_same_experts():
    x, chosen, weights, valid, load, w = case()

    def plain(x, w):
        return ours.plain_experts(x, chosen, weights * valid[:, None], w)

    def side(x, w):
        return ragged.ragged_experts(x, chosen, weights, valid, load, w)

    def total(f):
        return jax.jit(jax.value_and_grad(lambda x, w: jnp.sum(jnp.sin(f(x, w))), argnums=(0, 1)))(x, w)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), total(side), total(plain))
    np.testing.assert_allclose(jax.jit(side)(x, w), plain(x, w), atol=1e-5)


def test_profile_counts_nested_time_once(monkeypatch):
    def event(name, start, end):
        return SimpleNamespace(name=name, start_ns=start, duration_ns=end - start)

    thread = [
        event('outer', 0, 100e9),
        event('inner', 10e9, 40e9),
        event('loop', 0, 200e9),
        event('inner', 150e9, 151e9),
    ]
    plane = SimpleNamespace(lines=[SimpleNamespace(events=thread)])
    data = SimpleNamespace(from_file=lambda path: SimpleNamespace(planes=[plane]))
    monkeypatch.setattr('jax.profiler.ProfileData', data)
    found = hotspots.seconds(SimpleNamespace(rglob=lambda _: iter(['x'])), {'outer': 'a', 'inner': 'b'})
    assert found == Counter({'a': 70, 'b': 31})


def test_profile_knows_the_module_of_an_operation():
    x = jnp.ones((16, 8))
    w = ours.ExpertWeights(jnp.ones((2, 8, 4)), jnp.ones((2, 8, 4)), jnp.ones((2, 4, 8)))
    step = jax.jit(jax.grad(lambda w: ours.swiglu(x.reshape(2, 8, 8), w).sum()))
    found = hotspots.operations(step.lower(w).compile().as_text())
    assert Counter(found.values()).most_common(1)[0][0] == 'model.experts', found


def test_ratio_is_taken_pair_by_pair():
    got = measure.ratio([1.0, 2.0, 4.0], [3.0, 8.0, 8.0])
    assert (got['median'], got['min'], got['max'], got['n']) == (3.0, 2.0, 4.0, 3)


def test_a_side_that_fails_says_why():
    with pytest.raises(RuntimeError, match="invalid literal for int.*'many'"):
        arm.Arm('x', 'matmul.py', ['many']).ready()


def test_downloads_are_read_from_the_log():
    log = 'Downloading jax-0.1.whl (2.5 MB)\nUsing cached x\n  Downloading y.whl.metadata (800 bytes)\nDownloading z (5 kB)\n'
    assert replay.named(log) == 2_505_800
