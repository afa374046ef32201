"""Matrix products in float32, as a side to measure: what this machine's arithmetic gives at best."""

import sys
import time

import arm


def build(size: int):
    """One product of two `size` x `size` matrices; (call, facts)."""
    import jax
    import jax.numpy as jnp

    a = jax.random.normal(jax.random.key(0), (size, size), jnp.float32)
    start = time.perf_counter()
    compiled = jax.jit(lambda a, b: a @ b).lower(a, a).compile()
    seconds = time.perf_counter() - start
    return lambda: jax.block_until_ready(compiled(a, a)), {'compile_seconds': seconds, 'flops': 2 * size**3}


if __name__ == '__main__':
    arm.serve(lambda: build(int(sys.argv[1])))
