"""The recipe: published figures, bad input by name, round trips, and no jax."""

import json
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ladderbook.errors import ResourceError, UsageError
from ladderbook.files import canonical, digest
from ladderbook.recipe import plan, rules, rungs, spec
from ladderbook.recipe.generations import CAP, GENERATIONS, Scale, august_adam, august_rates, batch_august, depth_august
from ladderbook.recipe.spec import HERO, active, flops_per_token, parameters


def test_no_jax_in_a_fresh_interpreter():
    code = (
        'import sys, ladderbook.recipe.spec, ladderbook.recipe.generations, ladderbook.recipe.rules, '
        'ladderbook.recipe.rungs, ladderbook.recipe.plan\n'
        'ladderbook.recipe.plan.render(ladderbook.recipe.plan.plan(ladderbook.recipe.rungs.rung("hero")))\n'
        'print([m for m in ("jax", "flax", "numpy", "matplotlib") if m in sys.modules])'
    )
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == '[]'


def test_hero_to_the_digit():
    counts = parameters(HERO)
    assert counts['total'] == 535_477_106_688
    assert counts['active'] == 22_762_487_808
    assert counts['per_layer'] == 11_122_873_728
    assert counts['parts']['experts'] == 48 * 10_871_635_968
    assert sum(counts['parts'][k] for k in ('embedding', 'head', 'edge_norms')) == 1_579_167_744
    assert flops_per_token(HERO) == 150_362_652_672
    recipe = rungs.rung('hero').recipe
    assert (recipe.steps, recipe.tokens_per_step, recipe.warmup_steps) == (390_251, 46_137_344, 3_902)
    assert f'{recipe.matrix_lr:.8f} {recipe.adam_lr:.8f}' == '0.00329047 0.00075934'
    assert (recipe.beta1, recipe.beta2, recipe.final_fraction, recipe.clip) == (0.9, 0.95, 0.05, None)
    assert f'{recipe.epsilon:.2e}' == '6.04e-15'


@pytest.mark.parametrize(
    ('name', 'total', 'act', 'steps'),
    [
        ('rack-768', 1.592e9, 60.56e6, 11_420),
        ('rack-1024', 3.980e9, 162.0e6, 15_276),
        ('rack-1536', 11.53e9, 481.3e6, 15_128),
        ('rack-2048', 27.74e9, 1.171e9, 20_072),
        ('fast-512', 483.1e6, 20.84e6, 2_385),
    ],
)
def test_published_rungs(name, total, act, steps):
    recipe = rungs.rung(name).recipe
    counts = parameters(recipe.spec)
    assert float(f'{counts["total"]:.3e}') == float(f'{total:.3e}')
    assert float(f'{counts["active"]:.3e}') == float(f'{act:.3e}')
    assert recipe.steps == steps
    assert [d.name for d in recipe.departures] == ([] if name.startswith('rack') else ['vocab', 'batch'])


def test_logged_initial_norms():
    logged = {'query': 268, 'expert': 2624, 'head': 177, 'router': 67, 'gated_norm': 38.75}
    norms = spec.initial_norms(HERO)
    assert norms.keys() == logged.keys()
    for name, norm in norms.items():
        assert norm == pytest.approx(logged[name], rel=0.003), name


@pytest.mark.parametrize(
    ('width', 'kv', 'tokens'), [(64, (2, 1), 2048), (96, (3, 1), 4096), (128, (2, 1), 4096), (160, (5, 1), 8192), (192, (3, 1), 8192)]
)  # fmt: skip
def test_desk_rungs(width, kv, tokens):
    one = rungs.rung(f'desk-{width}')
    s, recipe = one.recipe.spec, one.recipe
    assert (s.kv_heads_local, s.kv_heads_global) == kv and recipe.tokens_per_step == tokens
    assert (s.layers, s.experts, s.top_k, s.sequence, s.window, s.vocab, s.norm_rank) == (4, 96, 2, 512, 256, 4096, 16)
    assert s.sparsity == HERO.sparsity and s.expert_width == s.latent_width == s.shared_width == width // 2
    assert abs(recipe.tokens - rungs.TOKENS_PER_ACTIVE * active(s)) <= recipe.tokens_per_step / 2
    assert recipe.matrix_lr < CAP
    rungs.require_host(one)


def test_every_rung_stands_by_name():
    assert set(rungs.NAMES) >= {'desk-micro', 'desk-64', 'desk-192', 'rack-768', 'rack-2048', 'hero', 'fast-512'}
    for name in rungs.NAMES:
        one = rungs.rung(name)
        assert one.name == name and one.evaluations <= one.recipe.steps
        again = rungs.from_dict(json.loads(canonical(rungs.to_dict(one))))
        assert again == one and digest(rungs.to_dict(again)) == digest(rungs.to_dict(one))
        assert rules.changed(one.recipe) == one.recipe
        if one.ladder == 'rack':
            with pytest.raises(ResourceError, match=f'{name} needs {one.devices} accelerators'):
                rungs.require_host(one)


SIZES = {
    'layers': 0, 'heads': 0, 'kv_heads_local': 5, 'kv_heads_global': 5, 'top_k': 384, 'rope_fraction': 0.51,
    'rope_pairing': 'halves', 'router_dtype': 'float16', 'sconv_sites': ('value',), 'capacity_factor': 0.0,
    'norm_eps': float('nan'), 'vocab': True, 'window': 1.5, 'global_every': -1,
}  # fmt: skip


@pytest.mark.parametrize('name', SIZES)
def test_impossible_sizes_are_refused_by_name(name):
    said = {'rope_pairing': 'rope pairing', 'router_dtype': 'router dtype', 'sconv_sites': 'short convolution'}
    word = said.get(name, name)
    with pytest.raises(UsageError, match=word) as seen:
        spec.from_dict(spec.to_dict(HERO) | {name: SIZES[name]})
    assert '\n' not in str(seen.value)
    with pytest.raises(UsageError, match=word):
        rules.august(6144, 10**12, **{name: SIZES[name]})


@pytest.mark.parametrize(
    ('word', 'width', 'tokens', 'more'),
    [
        ('width', 0, 10**9, {}),
        ('width', 100.5, 10**9, {}),
        ('width', 200, 10**9, {}),
        ('tokens', 1024, float('inf'), {}),
        ('at least one step', 1024, 1000, {}),
        ('matrix_lr', 1024, 10**9, {'matrix_lr': -0.1}),
        ('beta1', 1024, 10**9, {'beta1': 'high'}),
        ('batch', 1024, 10**9, {'batch': 0}),
        ('batch', 1024, 10**9, {'batch': 2.5}),
        ('clip', 1024, 10**9, {'clip': 0}),
        ('nesterov', 1024, 10**9, {'nesterov': 1}),
        ('optimizer', 1024, 10**9, {'optimizer': 'lion'}),
        ('warmup_steps', 1024, 10**9, {'warmup_steps': -1}),
        ('decay_steps', 1024, 10**10, {'decay_steps': 10**6}),
        ('did you mean batch', 1024, 10**9, {'bacth': 4}),
        ('steps', 1024, 10**9, {'steps': 4}),
    ],
)
def test_impossible_decisions_are_refused_by_name(word, width, tokens, more):
    with pytest.raises(UsageError, match=word) as seen:
        rules.august(width, tokens, **more)
    assert '\n' not in str(seen.value)


def test_unknown_names_are_refused_with_the_nearest():
    for call, near in (
        (lambda: rungs.rung('desk-46'), 'desk-64'),
        (lambda: rules.make('august-2026', 1024, 10**9), 'august'),
        (lambda: spec.historical('marin-8B'), 'marin-8b'),
        (lambda: spec.from_dict(spec.to_dict(HERO) | {'widht': 1}), 'width'),
    ):
        with pytest.raises(UsageError, match=near):
            call()
    with pytest.raises(UsageError, match='window is missing'):
        spec.from_dict({k: v for k, v in spec.to_dict(HERO).items() if k != 'window'})


@pytest.mark.parametrize('name', rungs.LIMITS)
def test_a_size_beyond_its_limit_is_refused_at_once(name):
    for value in (rungs.LIMITS[name] + 1, 9_999_999_999_999_999_999, 1e300):
        with pytest.raises(UsageError, match=rf'{name} is \S+; expected at most {rungs.LIMITS[name]:,}'):
            rungs.changed(rungs.rung('desk-64'), **{name: value})
    assert rungs.LIMITS.keys() >= {f for f in spec.ModelSpec.__dataclass_fields__ if type(getattr(HERO, f)) is int}
    assert getattr(HERO, name, 0) < rungs.LIMITS[name]


def test_a_changed_rung_states_its_own_needs():
    for name in rungs.NAMES:
        assert rungs.changed(rungs.rung(name)) == rungs.rung(name)
    plain = rungs.rung('desk-64')
    twice = rungs.changed(plain, tokens=2 * plain.recipe.tokens, evaluations=2 * plain.evaluations + 8)
    assert twice.recipe.tokens == 2 * plain.recipe.tokens
    assert twice.minutes - rungs.STARTUP == pytest.approx(2 * (plain.minutes - rungs.STARTUP), rel=0.01)
    wide = rungs.changed(plain, experts=8192)
    assert wide.memory > plain.memory + 16 * (8192 - 96) * 4 * 3 * 32 * 32 - 10**9 and wide.disk > plain.disk
    small = rungs.changed(plain, experts=8)
    assert (small.memory, small.disk) == (plain.memory, plain.disk) and small.minutes < plain.minutes
    half = rungs.changed(rungs.rung('rack-768'), layers=4)
    assert half.minutes is None and half.memory == 16 * parameters(half.recipe.spec)['total']


WIDTHS = st.integers(1, 24).map(lambda n: 256 * n)
BUDGETS = st.integers(10**9, 10**13)


@settings(max_examples=40, deadline=None)
@given(WIDTHS, BUDGETS, st.sampled_from(sorted(GENERATIONS)), st.integers(1, 64))
def test_recipes_are_closed_and_travel_as_json(width, tokens, name, batch):
    heads = width // 128
    sizes = {'kv_heads_local': heads, 'kv_heads_global': 1, 'batch': batch}
    recipe = rules.make(name, width, tokens, **sizes)
    assert abs(recipe.tokens - tokens) <= recipe.tokens_per_step / 2
    assert 0 < recipe.matrix_lr <= CAP and 0 < recipe.adam_lr <= CAP and 0.9 <= recipe.beta2 <= 0.9999
    assert recipe.warmup_steps + recipe.decay_steps <= recipe.steps
    assert rules.changed(recipe) == recipe
    again = rules.from_dict(json.loads(canonical(rules.to_dict(recipe))))
    assert again == recipe and digest(again.to_dict()) == digest(recipe.to_dict())
    json.dumps(asdict(recipe))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([512, 768, 1024, 1536, 2048, 6144]), BUDGETS)
def test_repeating_the_rule_is_no_departure_and_differing_is_one(width, tokens):
    plain = rules.august(width, tokens * 100)
    said = {k: getattr(plain, k) for k in rules.DECISIONS} | {k: getattr(plain.spec, k) for k in rules.SIZES}
    assert rules.august(width, tokens * 100, **said) == plain and plain.departures == ()
    other = rules.august(width, tokens * 100, adam_lr=plain.adam_lr / 2)
    assert [(d.name, d.value, d.rule) for d in other.departures] == [('adam_lr', plain.adam_lr / 2, plain.adam_lr)]
    assert replace(other, departures=(), adam_lr=plain.adam_lr) == plain


@settings(max_examples=60, deadline=None)
@given(WIDTHS, BUDGETS, st.integers(12, 26))
def test_the_august_rate_falls_with_horizon_and_width_and_grows_as_the_root_of_the_batch(width, tokens, power):
    here = Scale(width=width, tokens=tokens, tokens_per_step=2**power)
    rate = august_adam(here)
    assert august_adam(replace(here, tokens=2 * tokens)) == pytest.approx(rate * 2**-0.3461)
    assert august_adam(replace(here, width=2 * width)) == pytest.approx(rate * 2**-0.3448)
    assert august_adam(replace(here, tokens_per_step=2 ** (power + 2))) == pytest.approx(2 * rate)
    said = august_rates(here)
    assert said.adam_lr == min(CAP, rate) and said.matrix_lr == pytest.approx(min(CAP, 13 / 3 * rate))


def test_depth_and_batch_hold_the_published_tables():
    assert {w: depth_august(w) for w in (512, 768, 1024, 1280, 1536, 2048, 6144)} == {
        512: 6, 768: 8, 1024: 12, 1280: 14, 1536: 16, 2048: 22, 6144: 48,
    }  # fmt: skip
    assert batch_august(6144, 10**13, 65_536) * 65_536 == 46_137_344  # longer context keeps the tokens per step
    assert batch_august(640, 10**9, 4096) * 4096 == 2**17  # the largest power of two within T^0.6 = 251,189


def test_layers_count_from_nought_and_the_last_is_global():
    odd = replace(HERO, layers=6)
    assert odd.global_layers == (3, 5) and odd.kv_heads(3) == 6 and odd.kv_heads(4) == 12
    with pytest.raises(UsageError, match='layer is 6'):
        odd.is_global(6)


def test_plan_takes_the_leaves_of_the_training_side():
    one = rungs.rung('desk-64')
    found = plan.leaves(one.recipe.spec)
    alone, passed = plan.plan(one), plan.plan(one, [tuple(x) for x in found])
    assert passed['leaves_from'] == 'model' and alone['leaves_from'] == 'spec'
    assert {k: v for k, v in alone.items() if k != 'leaves_from'} == {
        k: v for k, v in passed.items() if k != 'leaves_from'
    }
    half = plan.memory([(p, s, 2, g) for p, s, _, g in found])
    assert 2 * half['bytes']['state'] == alone['memory']['bytes']['state']
    with pytest.raises(UsageError, match='muonh'):
        plan.memory([('x', (2, 2), 4, 'muon')])
    with pytest.raises(UsageError, match='expected 1884800'):
        plan.plan(one, [])


def test_memory_against_a_hand_count():
    found = plan.memory([('w', (3, 4, 5), 4, 'muonh'), ('e', (7, 5), 4, 'adam'), ('b', (3,), 4, 'balanced')])
    assert found['parameters'] == 98
    assert found['bytes']['weights'] == 4 * 98
    assert found['bytes']['moments'] == 4 * (60 + 2 * 35)
    assert found['bytes']['gradients'] == 4 * 95
    assert found['bytes']['published'] == 16 * 98


@pytest.mark.parametrize('name', rungs.NAMES)
def test_the_model_table_and_the_plan_list_the_same_arrays(name):
    lm = pytest.importorskip('ladderbook.model.lm', reason='the training side is not installed')
    shape = rungs.rung(name).recipe.spec
    for one in (shape, replace(shape, sconv_sites=('mlp',))):
        table = [(p, x.shape, 4, x.group) for p, x in lm.table(one).items()]
        assert table == [tuple(x) for x in plan.leaves(one)]
        assert {x.dtype for x in lm.table(one).values()} == {'float32'}


def test_layers_without_end_are_refused_before_they_are_counted():
    with pytest.raises(UsageError, match='layers is 10000000000000; expected at most 10000'):
        rules.august(1024, 1e9, layers=10**13)
