"""Folders and data sets of the hub: the same rows from every form, killed anywhere, against a hub that fails in every way."""

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ladderbook.data import folder, ingest, probe, remote, text
from ladderbook.data.folder import Columns
from ladderbook.data.sources import SOURCES, Source
from ladderbook.errors import IntegrityError, LockedError, ResourceError, UsageError
from ladderbook.files import lock
from ladderbook.settings import bundled
from pyarrow import parquet

REPO, COMMIT = 'some-lab/texts', 'c0ffee' * 6 + '1234'
ADDRESS = f'hf://{REPO}@{COMMIT}/en/train'
WHO = {'name': 'texts', 'domain': 'web'}
fuzz = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def kept(table):
    return table.filter(pc.equal(table['removed'], ''))


# --- a folder ---------------------------------------------------------------------------------------------------------


def here(top, **about):
    return folder.folder_source(top, **WHO, **{'licence': 'MIT', **about})


SOUND = st.text(st.characters(exclude_categories=['Cs', 'Cc']), min_size=1, max_size=60).filter(
    lambda t: text.normalise(t).strip()
)
BROKEN = [  # as a line, as a value of a Parquet column, reason in each (None: a fault that the form does not have)
    (b'{"text": "caf\xe9"}', b'caf\xe9', 'not UTF-8'),
    (b'{"text": ""}', b'', 'empty'),
    (b'{"text": null}', None, 'empty'),
    (b'{"text": "' + b'\\u0000' * 9 + b'"}', bytes(9), 'control bytes'),
]


@fuzz
@given(
    st.lists(SOUND, min_size=1, max_size=9), st.lists(st.sampled_from(BROKEN), max_size=5), st.integers(1, 5), st.randoms(),
)  # fmt: skip
def test_lines_and_rows_give_the_same_documents_however_they_are_cut(tmp_path_factory, sound, broken, size, rng):
    rows = [(json.dumps({'text': t}).encode(), t.encode(), '') for t in sound] + broken
    rng.shuffle(rows)
    found = {}
    for form in ('jsonl', 'parquet'):
        top = tmp_path_factory.mktemp(form)
        if form == 'jsonl':
            (top / 'a').write_bytes(b'\n'.join(line for line, *_ in rows))
        else:
            column = pa.array([value for _, value, _ in rows], pa.binary()).view(pa.string())
            parquet.write_table(pa.table({'text': column}), top / 'a', row_group_size=size)
        (top / 'a').rename(top / f'a.{form}')
        with pytest.MonkeyPatch.context() as m:
            m.setattr(folder, 'LINES', size)
            pieces = list(folder.stream(here(top), top))
        assert len(pieces) == -(-len(rows) // size)
        found[form] = folder.whole(pieces)
        assert folder.read_folder(here(top), top)[0].equals(found[form][0])
    wanted = sorted((text.content_id(text.normalise(t)), text.normalise(t)) for t in sound)
    for form, (table, aside) in found.items():
        assert sorted(zip(*(kept(table)[c].to_pylist() for c in ('id', 'text')), strict=True)) == wanted
        assert aside['reason'].to_pylist() == [reason for *_, reason in rows if reason]
        assert aside['path'].to_pylist() == [f'a.{form}#{n}' for n, r in enumerate(rows, 1) if r[2]]
        assert table.schema == ingest.INGESTED and aside.schema == ingest.QUARANTINE


@pytest.mark.parametrize(
    'line, reason, offset',
    [
        (b'{"text": "cut', 'not JSON', 0),
        (b'[1, 2]', 'not JSON', 0),
        (b'[' * 100_000, 'not JSON', 0),
        (b'{"text": ' + b'1' * 5000 + b'}', 'not JSON', 0),
        (b'{"text": "caf\xe9"}', 'not UTF-8', 13),
        (b'{"text": "\\ud800"}', 'not UTF-8', 0),
        (b'{"text": {"a": 1}}', 'not text', 0),
        (b'{"other": "x"}', 'empty', 0),
        (b'{"text": "' + b'z' * (ingest.LINE_LIMIT + 1) + b'"}', 'long line', 0),
    ],
)
def test_a_broken_line_is_set_aside_where_it_is(tmp_path, line, reason, offset):
    before = b'{"text": "before"}\n\n'
    (tmp_path / 'a.jsonl').write_bytes(before + line + b'\n{"text": "after"}')
    table, aside = folder.read_folder(here(tmp_path), tmp_path)
    assert sorted(kept(table)['path'].to_pylist()) == ['a.jsonl#1', 'a.jsonl#4']
    [said] = aside.to_pylist()
    assert said == {
        'source': 'texts', 'path': 'a.jsonl#3', 'offset': len(before) + offset, 'reason': reason, 'size': len(line),
    }  # fmt: skip


@pytest.mark.parametrize('ending', ['jsonl', 'txt', 'parquet'])
def test_a_row_without_end_is_passed_over(tmp_path, ending, monkeypatch):
    monkeypatch.setattr(folder, 'MEMBER_LIMIT', 1_000)
    long = 'word ' * 600_000
    if ending == 'parquet':
        parquet.write_table(pa.table({'text': [long, 'short']}), tmp_path / 'a.parquet')
    else:
        rows = [json.dumps({'text': t}) for t in (long, 'short')] if ending == 'jsonl' else [long]
        (tmp_path / f'a.{ending}').write_text('\n'.join(rows))
    (tmp_path / 'b.txt').write_text('beside')
    table, aside = folder.read_folder(here(tmp_path), tmp_path)
    assert set(kept(table)['text'].to_pylist()) == {'beside', 'short'} - {'short' if ending == 'txt' else ''}
    assert [(r['reason'], r['size'] - len(long) in range(13)) for r in aside.to_pylist()] == [('too large', True)]


def test_ids_licences_and_years_of_rows(tmp_path):
    rows = [
        {'body': 'one', 'url': 'u1', 'terms': 'cc-by-4.0', 'when': '2019-05-01'},
        {'body': 'two', 'url': 'u1', 'terms': 'MIT', 'when': 1998},
        {'body': 'one', 'url': 'u1', 'terms': 'MIT', 'when': None},
        {'body': 'four', 'url': None, 'terms': 'MIT', 'when': 'long ago'},
        {'body': 'five', 'url': 'u5', 'terms': 'gpl-3.0', 'when': 1},
        {'body': 'six', 'url': 'u6', 'terms': None, 'when': 2001},
    ]
    (tmp_path / 'a.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    (tmp_path / 'b.jsonl').write_text(json.dumps({'body': 'elsewhere', 'url': 'u1', 'terms': 'MIT'}))
    columns = Columns(text='body', id='url', licence='terms', year='when')
    source = here(tmp_path, licence='CC-BY-4.0 AND MIT', columns=columns)
    table, aside = folder.read_folder(source, tmp_path)
    good = {r['text']: (r['path'], r['licence'], r['year']) for r in kept(table).to_pylist()}
    assert good == {'one': ('u1', 'CC-BY-4.0', 2019), 'four': ('a.jsonl#4', 'MIT', None)}
    reasons = [(r['path'], r['reason']) for r in aside.to_pylist()]
    assert reasons == [
        ('u1', 'id clash'), ('u1', 'repeated'), ('u5', 'licence'), ('u6', 'licence'), ('u1', 'id clash'),
    ]  # fmt: skip
    assert len(set(table['doc'].to_pylist())) == len(table) == 7


def test_columns_of_many_types(tmp_path):
    ids = pa.array([b'a', b'b\xff', b'c']).view(pa.string())
    dates = pa.array([0, 10**15, 50 * 365 * 86400], pa.int64()).cast(pa.timestamp('s'), safe=False)
    texts = pa.array(['x', 'y', 'z']).dictionary_encode()
    parquet.write_table(pa.table({'t': texts, 'i': ids, 'd': dates}), tmp_path / 'a.parquet')
    table, _ = folder.read_folder(here(tmp_path, columns=Columns(text='t', id='i', year='d')), tmp_path)
    found = {(r['text'], r['path'], r['year']) for r in kept(table).to_pylist()}
    assert found == {('x', 'a', 1970), ('y', 'b\\xff', None), ('z', 'c', 2019)}


def test_another_reader_finds_the_same_texts(tmp_path):
    rows = [{'text': f'Text {i}\u00e9 "quoted"', 'n': i} for i in range(300)]
    (tmp_path / 'a.jsonl').write_text('\n'.join(map(json.dumps, rows[:100])))
    parquet.write_table(pa.Table.from_pylist(rows[100:]), tmp_path / 'b.parquet', row_group_size=64)
    table, _ = folder.read_folder(here(tmp_path), tmp_path)
    lines, stored = (tmp_path / n for n in ('a.jsonl', 'b.parquet'))
    query = f"select text from read_json('{lines}') union all select text from read_parquet('{stored}') order by text"
    assert sorted(table['text'].to_pylist()) == [t for (t,) in duckdb.sql(query).fetchall()]


@pytest.mark.parametrize('name', ['a.parquet', 'a.jsonl.gz', 'a.txt.zst'])
def test_a_damaged_file_is_refused_by_name(tmp_path, name):
    (tmp_path / name).write_bytes(b'\x1f\x8b\x08\x00PAR1 no more than a beginning')
    with pytest.raises(IntegrityError, match=f'{name} cannot be read to its end'):
        folder.read_folder(here(tmp_path), tmp_path)


def test_a_file_damaged_in_its_middle_is_refused_by_name(tmp_path):
    rng = random.Random(0)
    texts = [''.join(rng.choices('abcdefgh ', k=200)) for _ in range(3_000)]
    parquet.write_table(pa.table({'text': texts}), tmp_path / 'a.parquet', row_group_size=1_000, compression='zstd')
    data = bytearray((tmp_path / 'a.parquet').read_bytes())
    data[len(data) // 2 : len(data) // 2 + 5_000] = bytes(5_000)
    (tmp_path / 'a.parquet').write_bytes(data)
    pieces = folder.stream(here(tmp_path), tmp_path)
    assert len(next(pieces)[0]) == 1_000
    with pytest.raises(IntegrityError, match='a.parquet cannot be read to its end'):
        next(pieces)


def test_any_source_is_read(tmp_path):
    cut = bundled('tests', 'data', 'tiny') / 'speeches.txt'
    ours, theirs = (f(SOURCES['tiny-speeches'], cut) for f in (remote.read, ingest.ingest))
    assert ours[0].equals(theirs[0]) and len(ours[0])


def test_a_folder_that_is_none_or_lacks_the_column(tmp_path):
    with pytest.raises(UsageError, match='no file that can be read'):
        here(tmp_path)
    with pytest.raises(UsageError, match='not a folder'):
        here(tmp_path / 'nowhere')
    parquet.write_table(pa.table({'body': ['x'], 'n': [1]}), tmp_path / 'a.parquet')
    with pytest.raises(UsageError, match="a.parquet has no column 'text'; it has body, n"):
        folder.read_folder(here(tmp_path), tmp_path)
    with pytest.raises(UsageError, match="column 'n' holds int64; expected strings"):
        folder.read_folder(here(tmp_path, columns=Columns(text='n')), tmp_path)


@pytest.mark.parametrize(
    'extractor', ['rows', 'rows?', 'rows?id=x', 'rows?text=a&other=b', 'rows?text', 'plain?text=a']
)
def test_a_form_of_columns_that_is_none(extractor):
    with pytest.raises(UsageError, match='reads no rows'):
        folder.columns_of(extractor)


# --- a hub ------------------------------------------------------------------------------------------------------------


class Hub:
    "Files of one commit; `fault(method, path)` may answer with a status; `tamper(path, data)` changes what is sent; `sent` counts."

    def __init__(self):
        self.files, self.sent, self.seen = {}, {}, []
        self.fault = lambda method, path: None
        self.tamper = lambda path, data: data
        self.about = {'gated': False, 'private': False}
        self.stall, self.free = None, threading.Event()  # stall: (path, bytes after which nothing more comes)


class Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    hub = None

    def log_message(self, *args):
        pass

    def answer(self, status, value=None, **headers):
        body = json.dumps({} if value is None else value).encode()
        self.send_response(status)
        for k, v in {'Content-Length': str(len(body)), 'Content-Type': 'application/json', **headers}.items():
            self.send_header(k.replace('_', '-'), v)
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(body)

    def do_GET(self):
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.seen.append(path)
        if fault := hub.fault(self.command, path):
            status, code = fault
            return self.answer(status, {'error': 'planned'}, X_Error_Code=code)
        if path == f'/api/datasets/{REPO}/revision/{COMMIT}':
            return self.answer(200, {'id': REPO, 'sha': COMMIT, 'tags': [], 'siblings': [], **hub.about})
        if path == f'/api/datasets/{REPO}/tree/{COMMIT}':
            return self.answer(200, [self.entry(p, d) for p, d in sorted(hub.files.items())])
        if (found := re.fullmatch(f'/datasets/{REPO}/resolve/{COMMIT}/(.*)', path)) and found[1] in hub.files:
            return self.bytes(found[1])
        self.answer(404, {'error': 'not found'}, X_Error_Code='RepoNotFound')

    do_HEAD = do_GET

    def entry(self, path, data):
        oid = hashlib.sha1(b'blob %d\0' % len(data) + data, usedforsecurity=False).hexdigest()
        entry = {'type': 'file', 'path': path, 'size': len(data), 'oid': oid}
        large = {'oid': hashlib.sha256(data).hexdigest(), 'size': len(data), 'pointerSize': 130}
        return entry | ({'lfs': large} if path.endswith('.parquet') else {})

    def bytes(self, path):
        data, status, start = self.hub.tamper(path, self.hub.files[path]), 200, 0
        if found := re.fullmatch(r'bytes=(\d+)-', self.headers.get('Range', '')):
            start, status = int(found[1]), 206
        self.send_response(status)
        self.send_header('Content-Length', str(len(data) - start))
        if status == 206:
            self.send_header('Content-Range', f'bytes {start}-{len(data) - 1}/{len(data)}')
        self.end_headers()
        stop = self.hub.stall[1] if self.hub.stall and self.hub.stall[0] == path else len(data)
        self.wfile.write(data[start:stop])
        self.hub.sent[path] = self.hub.sent.get(path, 0) + max(0, stop - start)
        if stop < len(data):
            self.wfile.flush()
            self.hub.free.wait(30)
            self.close_connection = True


@contextmanager
def serving(handler, **state):
    server = ThreadingHTTPServer(('127.0.0.1', 0), type('Bound', (handler,), state))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={'poll_interval': 0.05}, daemon=True)
    thread.start()
    try:
        yield f'http://127.0.0.1:{server.server_port}'
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def shard(i, rows=40, group=15):
    sink = pa.BufferOutputStream()
    texts = [f'Text {i}.{j} ' + hashlib.sha256(f'{i}.{j}'.encode()).hexdigest() * 20 for j in range(rows)]
    urls = [f'u{j % 35}' for j in range(rows)]  # some ids clash, within a shard and between them
    parquet.write_table(pa.table({'text': texts, 'url': urls}), sink, row_group_size=group)
    return sink.getvalue().to_pybytes()


@pytest.fixture
def hub(monkeypatch):
    import huggingface_hub.utils._http as client

    found = Hub()
    found.files = {f'en/train-{i}.parquet': shard(i) for i in range(3)}
    found.files |= {
        'README.md': b'---\nlicense: cc-by-4.0\n---\n# Texts\n',
        '.gitattributes': b'',
        'en/test-0.parquet': shard(9),
    }
    with serving(Handler, hub=found) as found.url:
        monkeypatch.setenv('HF_ENDPOINT', found.url)
        monkeypatch.delenv('HF_TOKEN', raising=False)
        monkeypatch.setattr(client.time, 'sleep', lambda seconds: None)
        yield found
        found.free.set()


URL = Columns(id='url')


def test_a_split_is_the_same_as_a_folder_with_its_files(hub, tmp_path):
    seen = []
    source = remote.hf(ADDRESS, tmp_path / 'kept', **WHO, columns=URL, progress=seen.append)
    for path in remote.shards(list(hub.files), {}, remote.address(ADDRESS)):
        (tmp_path / 'folder' / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / 'folder' / path).write_bytes(hub.files[path])
    same = here(tmp_path / 'folder', licence='CC-BY-4.0', columns=URL)
    assert (source.sha256, source.licence, source.stated) == (same.sha256, 'CC-BY-4.0', 'README.md')
    assert (source.version, source.publisher, source.file) == (COMMIT, 'some-lab', ADDRESS)
    for ours, theirs in zip(
        remote.read(source, tmp_path / 'kept'), remote.read(same, tmp_path / 'folder'), strict=True
    ):
        assert ours.equals(theirs) and len(ours)
    assert seen == [15, 30, 40, 55, 70, 80, 95, 110, 120]
    assert hub.sent == {p: len(d) for p, d in hub.files.items() if 'train' in p or p == 'README.md'}
    assert sorted(p.name for p in (tmp_path / 'kept').iterdir()) == ['.lock', 'README.md', 'parts', 'state.json']


def test_what_is_there_needs_no_hub(hub, tmp_path):
    source = remote.hf(ADDRESS, tmp_path, **WHO)
    hub.fault = lambda method, path: (500, '')
    assert remote.hf(ADDRESS, tmp_path, **WHO) == source
    assert len(remote.read(source, tmp_path)[0]) == 120


PROGRAM = """
import sys
from pathlib import Path
import huggingface_hub.constants
huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE = 1024
from ladderbook.data import remote
from ladderbook.data.folder import Columns
pieces = remote.stream(sys.argv[1], Path(sys.argv[2]), name='texts', domain='web', columns=Columns(id='url'))
for n, _ in enumerate(pieces, 1):
    print(n, flush=True)
    if n == int(sys.argv[3]):
        sys.stdin.read()  # waits here to be killed
"""


def started(target, wait_at):
    command = [sys.executable, '-c', PROGRAM, ADDRESS, str(target), str(wait_at)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def killed(process):
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def test_killed_between_pieces_it_goes_on_and_fetches_nothing_twice(hub, tmp_path):
    whole = remote.hf(ADDRESS, tmp_path / 'whole', **WHO, columns=URL)
    hub.sent.clear()
    for wait_at in (2, 3, 8):
        process = started(tmp_path / 'kept', wait_at)
        assert [int(next(process.stdout)) for _ in range(wait_at)][-1] == wait_at
        killed(process)
    source = remote.hf(ADDRESS, tmp_path / 'kept', **WHO, columns=URL)
    assert source == whole and hub.sent == {p: len(hub.files[p]) for p in hub.sent} and len(hub.sent) == 4
    for ours, theirs in zip(*(remote.read(source, tmp_path / n) for n in ('kept', 'whole')), strict=True):
        assert ours.equals(theirs)


def test_killed_in_a_download_it_asks_for_the_rest(hub, tmp_path):
    path = 'en/train-1.parquet'
    size, half = len(hub.files[path]), 10_000
    assert size > 2 * half
    hub.stall = (path, half)
    process = started(tmp_path, 99)
    there = tmp_path / 'shard-00001'
    until = time.monotonic() + 60
    while not (there.exists() and there.stat().st_size >= half - 1024):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    killed(process)
    had, hub.stall = there.stat().st_size, None
    hub.free.set()
    source = remote.hf(ADDRESS, tmp_path, **WHO, columns=URL)
    assert hub.sent[path] == half + size - had and 0 <= half - had < 1024, 'at most a block of the client comes again'
    assert len(remote.read(source, tmp_path)[0]) == 120


def test_a_connection_that_breaks_is_taken_up_by_itself(hub, tmp_path):
    path = 'en/train-0.parquet'
    hub.stall = (path, 9_000)
    hub.free.set()
    whole = hub.files[path]

    def later(p, data):
        if hub.sent.get(path):
            hub.stall = None
        return data

    hub.tamper = later
    source = remote.hf(ADDRESS, tmp_path, **WHO, columns=URL)
    assert hub.seen.count(f'/datasets/{REPO}/resolve/{COMMIT}/{path}') == 2 and hub.files[path] == whole
    assert len(remote.read(source, tmp_path)[0]) == 120


@pytest.mark.parametrize('path', ['en/train-1.parquet', 'README.md'])
def test_other_bytes_than_the_commit_names(hub, tmp_path, path):
    hub.tamper = lambda p, data: data[:-9] + b'x' * 9 if p == path else data
    with pytest.raises(IntegrityError, match=f'{path} of {REPO} came as .* nothing of it was kept'):
        remote.hf(ADDRESS, tmp_path, **WHO)
    hub.tamper = lambda p, data: data
    assert len(remote.read(remote.hf(ADDRESS, tmp_path, **WHO), tmp_path)[0]) == 120


@pytest.mark.parametrize(
    'status, code, kind, words',
    [
        (403, 'GatedRepo', UsageError, 'is gated'),
        (404, 'RepoNotFound', UsageError, 'the hub has no'),
        (404, 'RevisionNotFound', UsageError, 'the hub has no'),
        (401, '', UsageError, r'refuses access to .* \(401\)'),
        (500, '', ResourceError, 'the hub failed'),
    ],
)
def test_a_hub_that_refuses(hub, tmp_path, status, code, kind, words):
    for where in ('/api/', 'train-1'):
        hub.fault = lambda method, path, where=where: (status, code) if where in path else None
        with pytest.raises(kind, match=words):
            remote.hf(ADDRESS, tmp_path / where.strip('/'), **WHO)
    hub.fault = lambda method, path: None
    assert len(remote.read(remote.hf(ADDRESS, tmp_path / 'train-1', **WHO), tmp_path / 'train-1')[0]) == 120


def test_no_hub_at_all(hub, tmp_path, monkeypatch):
    monkeypatch.setenv('HF_ENDPOINT', 'http://127.0.0.1:9')
    with pytest.raises(ResourceError, match='goes on where it stopped'):
        remote.hf(ADDRESS, tmp_path, **WHO)


def test_a_folder_of_something_else_in_use_or_damaged(hub, tmp_path):
    source = remote.hf(ADDRESS, tmp_path, **WHO)
    with pytest.raises(UsageError, match="holds licence '', not 'MIT'; name another folder"):
        remote.hf(ADDRESS, tmp_path, **WHO, licence='MIT')
    with pytest.raises(UsageError, match='holds address'):
        remote.hf(ADDRESS.replace('train', 'test'), tmp_path, **WHO)
    with lock(tmp_path / '.lock', 'it'), pytest.raises(LockedError):
        remote.hf(ADDRESS, tmp_path, **WHO)
    parts = sorted((tmp_path / 'parts').iterdir())
    parts[0].unlink()
    with pytest.raises(IntegrityError, match='is not what was kept'):
        remote.read(source, tmp_path)


def test_half_a_split_is_not_read(hub, tmp_path):
    source = remote.hf(ADDRESS, tmp_path / 'whole', **WHO)
    next(pieces := remote.stream(ADDRESS, tmp_path / 'half', **WHO))
    pieces.close()
    with pytest.raises(IntegrityError, match='does not hold all'):
        remote.read(source, tmp_path / 'half')


@pytest.mark.parametrize(
    'card, words',
    [
        (b'# No fields\n', 'states no licence'),
        (b'---\nlicense: other\n---\n', 'states no licence'),
        (b'---\nlicense: mit\nconfigs:\n- config_name: en\n  data_files: nowhere/*\n---\n', 'no files to read'),
        (b'---\nlicense: mit\nconfigs:\n- config_name: fr\n  data_files: en/*\n---\n', 'it has fr/train'),
        (b'---\nlicense: mit\nconfigs:\n- config_name: en\n  data_files: README.md\n---\n', 'there is README.md'),
    ],
)
def test_a_card_that_does_not_help(hub, tmp_path, card, words):
    hub.files['README.md'] = card
    with pytest.raises(UsageError, match=words):
        remote.hf(ADDRESS, tmp_path, **WHO)


def test_a_card_that_states_patterns_and_licences(hub, tmp_path):
    hub.files['README.md'] = (
        b'---\nlicense: [mit, cc0-1.0]\nconfigs:\n- config_name: en\n  data_files:\n  - split: train\n'
        b'    path: ["**/train-[0].parquet", "en/test-?.parquet"]\n---\n'
    )
    source = remote.hf(ADDRESS, tmp_path, **WHO)
    assert source.licence == 'MIT AND CC0-1.0' and [f['path'] for f in remote.state(tmp_path)['files']] == [
        'en/test-0.parquet'
    ]


# --- is it still there ------------------------------------------------------------------------------------------------


def dataset(name='there'):
    return Source(
        name=name, domain='web', file=ADDRESS, sha256='', licence='MIT', stated='', extractor='rows?text=text'
    )


@pytest.mark.parametrize(
    'fault, about, status',
    [
        (None, {}, 'reachable'),
        (None, {'gated': 'manual'}, 'gated'),
        (None, {'private': True}, 'gated'),
        ((403, 'GatedRepo'), {}, 'gated'),
        ((404, 'RevisionNotFound'), {}, 'gone'),
        ((401, 'RepoNotFound'), {}, 'gone'),
        ((500, ''), {}, 'unknown'),
    ],
)
def test_a_data_set_is_asked_for(hub, fault, about, status):
    hub.fault = lambda method, path: fault
    hub.about |= about
    [found] = probe.probe([dataset()])
    assert (found['source'], found['status']) == ('there', status) and re.fullmatch(r'\d{4}-\d\d-\d\d', found['date'])


class Index(BaseHTTPRequestHandler):
    "A package index on which every package has a fate of its own."

    def log_message(self, *args):
        pass

    def do_GET(self):
        name = self.path.strip('/').split('/')[-1]
        body = b''.join(
            b'<a href="/%s-%s.tar.gz">%s-%s.tar.gz</a>' % (n, v, n, v)
            for n in [name.encode()]
            for v in (b'1.0', b'1.1')
        )
        status = {'there': 200, 'nothing': 200, 'gated': 401, 'sick': 500}.get(name, 404)
        body = body if name == 'there' else b''
        self.send_response(status)
        self.send_header('Content-Type', 'text/html')
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def package(name, version='1.0'):
    about = {
        'domain': 'd',
        'file': f'{name}-{version}.tar.gz',
        'sha256': '',
        'licence': 'MIT',
        'stated': '',
        'extractor': 'pages',
    }
    return Source(name=f'{name} {version}', package=name, version=version, **about)


@pytest.fixture
def no_settings_of_pip(monkeypatch):
    for k in list(os.environ):
        if k.startswith('PIP_'):
            monkeypatch.delenv(k)
    monkeypatch.setenv('PIP_CONFIG_FILE', os.devnull)


def test_packages_are_asked_for(no_settings_of_pip, monkeypatch, hub):
    names = ('there', 'gone', 'nothing', 'gated', 'sick')
    with serving(Index) as url:
        monkeypatch.setenv('PIP_INDEX_URL', f'{url}/simple')
        asked = [*map(package, names), package('there', '2.0'), SOURCES['tiny-docs'], dataset()]
        found = {r['source']: r['status'] for r in probe.probe(asked)}
    assert found == {
        'there 1.0': 'reachable', 'gone 1.0': 'gone', 'nothing 1.0': 'gone', 'gated 1.0': 'gated', 'sick 1.0': 'unknown', 'there 2.0': 'gone', 'there': 'reachable',
    }  # fmt: skip


def test_the_answer_never_is_an_error(no_settings_of_pip, monkeypatch):
    monkeypatch.setenv('PIP_INDEX_URL', 'http://127.0.0.1:9/simple')
    monkeypatch.setenv('HF_ENDPOINT', 'no address')
    odd = Source(name='odd', domain='', file='hf://odd', sha256='', licence='', stated='', extractor='')
    found = probe.probe([package('there'), dataset(), odd])
    assert [r['status'] for r in found] == ['unknown'] * 3
    monkeypatch.setattr(sys, 'executable', '/nowhere/python')
    assert [r['status'] for r in probe.probe([package('there')])] == ['unknown']


def test_answers_are_added_and_never_overwritten(tmp_path):
    first = {'source': 's', 'status': 'reachable', 'date': '2026-12-01', 'how': 'h'}
    later = first | {'status': 'gone', 'date': '2027-01-01'}
    probe.record(tmp_path / 'probe.json', [first])
    assert probe.record(tmp_path / 'probe.json', [later, first]) == [first, later]
    (tmp_path / 'probe.json').write_text(json.dumps({'schema': probe.SCHEMA, 'version': 1, 'asked': [{'source': 's'}]}))
    with pytest.raises(IntegrityError, match='lacks the key asked'):
        probe.record(tmp_path / 'probe.json', [first])
