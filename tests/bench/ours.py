"""A training step of our own model, as a side to measure; in one variant its experts are computed by `ragged_dot`."""

import argparse
import dataclasses
import time

import arm

SPEC = {
    'layers': 4, 'width': 128, 'heads': 4, 'head_dim': 32, 'kv_heads_local': 2, 'kv_heads_global': 2, 'experts': 32,
    'top_k': 4, 'expert_width': 64, 'latent_width': 128, 'shared_experts': 1, 'shared_width': 128, 'vocab': 4096,
    'sequence': 256, 'window': 256, 'norm_rank': 128, 'sconv_sites': (), 'rope_pairing': 'split',
    'capacity_factor': 1.25,
}  # fmt: skip


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        'shape', help="a rung, a rung with other experts ('desk-64:384/8'), or 'marin': the peer's shape and parts"
    )
    parser.add_argument('--experts', choices=['capacity', 'dropless', 'ragged'], default='capacity')
    parser.add_argument('--adam', action='store_true', help="optax's Adam for all parameters, not the recipe's groups")
    return parser.parse_args()


def recipe(shape: str):
    """The recipe of a rung; for 'marin' that of desk-128 with the peer's shape put in."""
    from ladderbook.recipe import rungs, spec

    if shape != 'marin':
        name, _, counts = shape.partition(':')
        one = rungs.rung(name)
        experts, _, chosen = counts.partition('/')
        return (rungs.changed(one, experts=int(experts), top_k=int(chosen)) if counts else one).recipe
    shape, batch, base = spec.ModelSpec(**SPEC), 8, rungs.rung('desk-128').recipe
    return dataclasses.replace(base, spec=shape, batch=batch, tokens=base.steps * batch * shape.sequence)


def batch(recipe):
    """Random tokens, one document a row."""
    import numpy as np

    size = (recipe.batch, recipe.spec.sequence)
    stream = np.random.default_rng(0).integers(1, recipe.spec.vocab, (size[0], size[1] + 1), dtype=np.int32)
    whole = {'segments': np.ones(size, np.int32), 'weights': np.ones(size, np.float32)}
    return {'tokens': stream[:, :-1], 'targets': stream[:, 1:], **whole}


def program(given):
    """The step's program under the variant asked for."""
    import optax
    import ragged
    from ladderbook.model import lm
    from ladderbook.train import step

    if given.experts == 'ragged':
        ragged.install()
    what = recipe(given.shape)
    how = dataclasses.replace(step.DESK, compute=lm.Compute(dropless=given.experts == 'dropless'))
    program = step.program(what, how)
    return dataclasses.replace(program, optimiser=optax.adam(1e-3)) if given.adam else program


def build(given):
    """One training step on fixed random tokens; (call, facts)."""
    import jax
    import numpy as np
    from ladderbook.recipe.spec import flops_per_token
    from ladderbook.train import step

    p = program(given)
    rows = jax.tree.map(jax.numpy.asarray, batch(p.recipe))
    start = time.perf_counter()
    compiled = step.compile_step(p)
    seconds = time.perf_counter() - start
    held = [step.initial_state(p, 0), None]
    count = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(held[0].params))

    def call():
        held[:] = compiled(held[0], rows)
        jax.block_until_ready(held)

    tokens = p.recipe.batch * p.recipe.spec.sequence
    return call, {
        'compile_seconds': seconds,
        'parameters': count,
        'tokens': tokens,
        'flops': tokens * flops_per_token(p.recipe.spec),
        'temporary_bytes': compiled.memory_analysis().temp_size_in_bytes,
    }


if __name__ == '__main__':
    given = arguments()
    arm.serve(lambda: build(given))
