"""A training step of Marin's own package (its Snowball model, the recipe of the 67B run), as a side to measure.

Runs in the peer's environment, never in ours: nothing here imports ladderbook. On one device the package computes the
experts by its local path; on several it shards tokens and experts over an axis called expert.
"""

import argparse
import time
from importlib.metadata import version

import arm


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--devices', type=int, default=1)
    parser.add_argument('--implementation', default=None, help='expert dispatch; none: what the package picks')
    parser.add_argument('--attention', default=None, choices=['reference', 'xla_flash'])
    for name, value in SHAPE.items():
        parser.add_argument(f'--{name}', type=int, default=value)
    return parser.parse_args()


SHAPE = {
    'layers': 4, 'width': 128, 'heads': 4, 'kv_heads': 2, 'head_dim': 32, 'experts': 32, 'top_k': 4,
    'expert_width': 64, 'shared_width': 128, 'vocab': 4096, 'sequence': 256, 'window': 256, 'batch': 8,
}  # fmt: skip


def build(given):
    """One Adam step of the package's model on fixed random tokens; (call, facts)."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from levanter.grug.loss import fused_linear_softmax_cross_entropy_loss
    from levanter.grug.sharding import compact_grug_mesh
    from levanter.models.snowball import SnowballConfig, SnowballTransformer

    assert len(jax.devices()) == given.devices, (jax.devices(), 'set XLA_FLAGS for the number of devices')
    config = SnowballConfig(
        vocab_size=given.vocab, hidden_dim=given.width, num_layers=given.layers, num_heads=given.heads,
        num_kv_heads=given.kv_heads, head_dim=given.head_dim, num_experts=given.experts, max_seq_len=given.sequence,
        num_experts_per_token=given.top_k, intermediate_dim=given.expert_width, sliding_window=given.window,
        shared_expert_intermediate_dim=given.shared_width, qk_mult=1.3, initializer_std=0.5 / given.width**0.5,
        moe_implementation=given.implementation, attention_implementation=given.attention,
    )  # fmt: skip
    optimizer = optax.adam(1e-3)

    def loss(model, tokens, targets):
        hidden = model(tokens)
        return fused_linear_softmax_cross_entropy_loss(hidden, model.output_proj, targets, logsumexp_weight=1e-4)

    def step(model, state, tokens, targets):
        value, gradients = jax.value_and_grad(loss)(model, tokens, targets)
        updates, state = optimizer.update(gradients, state, model)
        return optax.apply_updates(model, updates), state, value

    jax.set_mesh(compact_grug_mesh(expert_axis_size=given.devices))
    model = SnowballTransformer.init(config, key=jax.random.key(0))
    state = optimizer.init(model)
    stream = np.random.default_rng(0).integers(1, given.vocab, (given.batch, given.sequence + 1), dtype=np.int32)
    tokens, targets = jnp.asarray(stream[:, :-1]), jnp.asarray(stream[:, 1:])
    targets = jax.sharding.reshard(targets, jax.P(('replica_dcn', 'data', 'expert')))
    start = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(model, state, tokens, targets).compile()
    seconds = time.perf_counter() - start
    held = [model, state, None]

    def call():
        held[:] = compiled(held[0], held[1], tokens, targets)
        jax.block_until_ready(held[2])

    parameters = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(model))
    names = ('marin-levanter', 'jax', 'jaxlib', 'optax', 'numpy')
    return call, {
        'compile_seconds': seconds,
        'parameters': parameters,
        'tokens': given.batch * given.sequence,
        'temporary_bytes': compiled.memory_analysis().temp_size_in_bytes,
        'versions': {name: version(name) for name in names},
    }


if __name__ == '__main__':
    given = arguments()
    arm.serve(lambda: build(given))
