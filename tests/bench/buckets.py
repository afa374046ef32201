"""Topics and quality on the training text of a corpus: what they find, how the classifier agrees with its labels on documents that it has
not learnt from, and what planted damage does to the score.

Writes artifacts/studies/buckets.json, which the chapters on topics and quality show; `seconds` there is processor time, everything else is
the same whenever it is run. `python tests/bench/buckets.py [FOLDER]` takes the corpus in that folder (default: desk-v1).
"""

import sys
import time
from pathlib import Path

import numpy as np

DAMAGED = 150  # documents per modality


def share(groups, names, size, many: int) -> dict[str, list[float]]:
    """Of each source, the share of its bytes in each group."""
    found = {n: np.bincount(groups[names == n], size[names == n], many) for n in sorted(set(names))}
    return {n: [round(float(x), 3) for x in f / f.sum()] for n, f in found.items()}


def curve(rest, model, kind: str, synthetic: dict[str, str]) -> dict:
    """Per level of the model, human and synthetic apart: documents, mean score, mean label (0 to 1)."""
    from ladderbook.data import quality, rubric

    given = quality.score(rest, model, dict.fromkeys(rest['source'].to_pylist(), kind))
    score, level = given['score'].to_numpy(), given['quality'].to_numpy()
    said = rubric.label(quality.features_of(rest['text'].combine_chunks(), kind), kind) / 16
    made = np.array([synthetic[s] != 'no' for s in rest['source'].to_pylist()])
    found = {}
    for name, part in (('human', ~made), ('synthetic', made)):
        rows = [(level == q) & part for q in range(5)]
        found[name] = [[int(r.sum()), *(round(float(x[r].mean()), 3) for x in (score, said))] for r in rows if r.any()]
    return {k: v for k, v in found.items() if v}


def dose(rest, model, kind: str) -> dict[str, list[float]]:
    """Mean score of the same documents, cut to 6,000 characters, by kind of damage and severity 0 to 4."""
    import pyarrow as pa
    from ladderbook.data import quality, rubric

    texts, found = [t[:6000] for t in rest['text'].to_pylist()], {}
    for damage in rubric.DAMAGE[kind]:
        means = []
        for s in range(5):
            hurt = [rubric.damage(t, damage, s, 7 + i) if s else t for i, t in enumerate(texts)]
            table = rest.select(['doc', 'source']).append_column('text', pa.array(hurt, pa.large_string()))
            given = quality.score(table, model, dict.fromkeys(rest['source'].to_pylist(), kind))
            means.append(round(float(given['score'].to_numpy().mean()), 3))
        found[damage] = means
    return found


def held(documents, model, modality):
    """Of each modality the documents that the model has not learnt from, smallest ids first."""
    import pyarrow as pa
    from ladderbook.data import topics

    kinds = np.array([modality[s] for s in documents['source'].to_pylist()])
    for kind in model.kinds:
        mine = documents.filter(pa.array(kinds == kind))
        rest = np.setdiff1d(np.arange(len(mine)), topics.sample(mine, model.settings['size'])[0])
        yield kind, mine.take(pa.array(rest)).sort_by('id')


def main(folder: str = ''):
    """Measure, write the record."""
    import pyarrow.compute as pc
    from ladderbook.data import pipeline, quality, tokens, topics
    from ladderbook.data.sources import SOURCES
    from ladderbook.files import write_json
    from ladderbook.settings import bundled, load
    from sklearn.metrics import normalized_mutual_info_score

    corpus = tokens.open_corpus(Path(folder) if folder else load().paths.cache / 'corpora' / 'desk-v1')
    documents = pipeline.ledger(corpus)
    documents = documents.filter(pc.equal(documents['split'], 'train'))
    modality = {n: s.category for n, s in SOURCES.items()}
    seconds, began = {}, time.process_time()

    def took(what):
        nonlocal began
        seconds[what] = round(time.process_time() - began, 1)
        began = time.process_time()

    found = topics.fit(documents)
    took('fit topics')
    placed = topics.assign(documents, found)
    took('assign topics')
    model = quality.fit(documents, modality)
    took('fit quality')
    scored = quality.score(documents, model, modality)
    took('score quality')
    names, size = documents['source'].to_numpy(zero_copy_only=False), documents['bytes'].to_numpy()
    topic, level = placed['topic'].to_numpy(), scored['quality'].to_numpy()
    bytes_ = np.zeros((found.count, 5), np.int64)
    np.add.at(bytes_, (topic, level), size)
    synthetic = {n: s.synthetic for n, s in SOURCES.items()}
    rest = dict(held(documents, model, modality))
    fine = placed['fine'].to_numpy()
    value = {
        'corpus': corpus.name,
        'documents': len(documents),
        'bytes': int(size.sum()),
        'seconds': seconds,
        'topics': {
            'terms': found.terms,
            'sources': share(topic, names, size, found.count),
            'nmi': {
                'topics': round(float(normalized_mutual_info_score(names, topic)), 3),
                'fine': round(float(normalized_mutual_info_score(names, fine)), 3),
            },
        },
        'quality': {
            'sources': share(level, names, size, 5),
            'agreement': quality.agreement(documents, model, modality, synthetic).to_pylist(),
            'curve': {k: curve(r, model, k, synthetic) for k, r in rest.items()},
            'dose': {k: dose(r.slice(max(0, len(r) - DAMAGED)), model, k) for k, r in rest.items()},
        },
        'buckets': bytes_.tolist(),
    }
    write_json(bundled('artifacts', 'studies', 'buckets.json'), value, 'ladderbook.buckets')
    print(seconds, value['topics']['nmi'], *value['quality']['agreement'], sep='\n')


if __name__ == '__main__':
    main(*sys.argv[1:])
