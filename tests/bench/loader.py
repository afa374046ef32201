"""Rows of tokens in shuffled order, as a side to measure: our `rows`, grain item by item, a bare numpy gather.

All three read the same file of random uint16 tokens and give int32 rows; ours also marks the documents (segments and
weights), which the two others leave to the reader.
"""

import sys
import tempfile
from pathlib import Path

import arm

SEQUENCE, BATCH, DOCUMENT, TOKENS = 512, 32, 700, 20_000_000


def stream(folder: Path):
    """A memory map of random tokens in which a document ends about every 700 tokens."""
    import numpy as np

    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 4096, TOKENS, dtype=np.uint16)
    tokens[rng.integers(0, TOKENS, TOKENS // DOCUMENT)] = 0
    tokens.tofile(folder / 'train.bin')
    return np.memmap(folder / 'train.bin', np.uint16, 'r')


def ours(train):
    """`rows` of our loader, step by step."""
    from types import SimpleNamespace

    from ladderbook.data import loader

    corpus, step = SimpleNamespace(train=train), iter(range(10**9))
    return lambda: loader.rows(corpus, SEQUENCE, BATCH, 0, next(step))['tokens']


def grained(train):
    """grain's own way: a source with a row as its item, its shuffle, its batch."""
    import grain
    import numpy as np

    class Rows:
        def __len__(self):
            return (len(train) - 1) // SEQUENCE

        def __getitem__(self, i):
            return train[i * SEQUENCE : (i + 1) * SEQUENCE + 1].astype(np.int32)

    data = grain.MapDataset.source(Rows()).shuffle(seed=0).repeat().batch(BATCH)
    iterator = iter(data.to_iter_dataset(grain.ReadOptions(num_threads=0)))
    return lambda: next(iterator)


def gathered(train):
    """The least that anybody must do: shuffled numbers, one gather."""
    import numpy as np

    order, step, whole = np.random.default_rng(0).permutation((len(train) - 1) // SEQUENCE), iter(range(10**9)), None
    whole = np.arange(SEQUENCE + 1)

    def call():
        rows = order[(next(step) * BATCH + np.arange(BATCH)) % len(order)]
        return train[rows[:, None] * SEQUENCE + whole].astype(np.int32)

    return call


def build(name: str, batches: int = 200):
    """`batches` batches of side `name`; (call, facts)."""
    with tempfile.TemporaryDirectory() as folder:
        one = {'rows': ours, 'grain': grained, 'numpy': gathered}[name](stream(Path(folder)))

    def call():
        for _ in range(batches):
            one()

    return call, {'tokens': batches * BATCH * SEQUENCE}


if __name__ == '__main__':
    arm.serve(lambda: build(sys.argv[1]))
