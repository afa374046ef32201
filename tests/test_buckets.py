"""Topics, quality and n-grams: what they must say about texts they have not seen, on any machine, and about servers that fail."""

import io
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from ladderbook.data import ngram, quality, rubric, topics
from ladderbook.data.endpoint import Client
from ladderbook.data.engine import Local
from ladderbook.data.ingest import ingest
from ladderbook.data.sources import SOURCES, fetch, plan
from ladderbook.errors import IntegrityError, ResourceError, UsageError

CATEGORY = {n: SOURCES[n].category for n in plan('tiny').sources}
SUBJECTS = {
    'sea': 'whale ship harbour sailor storm anchor deck captain boat tide net crew mast island wave rope',
    'kitchen': 'onion butter oven flour sugar pan spoon recipe dough salt pepper soup bread cook plate cream',
    'law': 'court judge clause contract appeal statute jury verdict tenant licence liability counsel oath trial damages party',
    'music': 'violin tempo chord melody concert drummer chorus piano rhythm tune singer band opera note guitar stage',
}


def table(texts, source='text', names=None):
    "A table of documents."
    n = len(texts)
    return pa.table(
        {
            'doc': names or [f'd{i:05}' for i in range(n)],
            'source': [source] * n if isinstance(source, str) else source,
            'id': [sha256(t.encode()).hexdigest() for t in texts],
            'text': pa.array(texts, pa.large_string()),
            'bytes': pa.array([len(t.encode()) for t in texts], pa.int64()),
        }
    )


@pytest.fixture(scope='module')
def four():
    "160 documents of each of four subjects, and which they are of."
    rng, texts, names = np.random.default_rng(0), [], []
    for subject, words in SUBJECTS.items():
        words = words.split()
        for i in range(160):
            picked = rng.choice(words, (12, 3))
            texts.append(f'{subject} {i}. ' + ' '.join(f'The {a} was near the {b} and a {c}.' for a, b, c in picked))
            names.append(subject)
    order = rng.permutation(len(texts))
    return table([texts[i] for i in order]), [names[i] for i in order]


@pytest.fixture(scope='module')
def tiny(tmp_path_factory):
    "The documents of the corpus that ships with the book."
    files = fetch(plan('tiny').sources, tmp_path_factory.mktemp('tiny'))
    found = pa.concat_tables(ingest(SOURCES[n], files[SOURCES[n].file])[0] for n in plan('tiny').sources)
    return found.filter(pc.equal(found['removed'], ''))


@pytest.fixture(scope='module')
def model(tiny):
    return quality.fit(tiny, CATEGORY)


@pytest.fixture(scope='module')
def found(four):
    "The topics of the four subjects."
    return topics.fit(four[0], fine=16, topics=4, least=0.1)


# --- topics


def test_topics_find_the_subjects_and_keep_a_minimum_share(four, found):
    documents, subject = four
    given = topics.assign(documents, found)['topic'].to_pylist()
    pairs = {}
    for s, t in zip(subject, given, strict=True):
        pairs.setdefault(s, []).append(t)
    main = {s: max(set(t), key=t.count) for s, t in pairs.items()}
    assert sorted(main.values()) == [0, 1, 2, 3]
    assert all(pairs[s].count(t) >= 0.98 * len(pairs[s]) for s, t in main.items())
    for s, t in main.items():
        new = topics.why(f'She wrote of a {SUBJECTS[s].split()[3]} and of the {SUBJECTS[s].split()[5]}.', found)
        assert new['topic'] == t and set(new['words']) & set(SUBJECTS[s].split())
        assert set(found.terms[t]) & {s, *SUBJECTS[s].split()}
    for wanted, least in ((4, 0.3), (20, 0.01), (0, 0.1)):
        with pytest.raises(UsageError):
            topics.fit(documents, fine=16, topics=wanted, least=least)


def test_a_text_without_known_words_has_a_place_and_no_similarity(found):
    strange = topics.assign(table(['', '   \n', 'zzqx', '漢字かな']), found)
    assert strange['topic'].to_pylist() == [0] * 4 and strange['similarity'].to_pylist() == [0] * 4
    assert topics.why('', found)['topic'] == 0


def test_blocks_and_workers_change_nothing(four, found, tiny, model):
    documents = four[0]
    counted = ngram.fit(documents, 200_000)
    for run in (
        lambda e: topics.assign(documents, found, engine=e),
        lambda e: quality.score(tiny, model, CATEGORY, engine=e),
        lambda e: ngram.score(documents, counted, engine=e),
    ):
        whole = run(Local())
        assert run(Local(rows=7)).equals(whole) and run(Local(workers=2, rows=301)).equals(whole)


PROGRAM = """
import hashlib, sys
import pyarrow as pa
from ladderbook.data import ngram, quality, topics
documents = pa.ipc.open_file(sys.argv[1]).read_all()
found, graded = topics.fit(documents, fine=16, topics=4, least=0.1), quality.fit(documents, {'text': 'prose'})
given = topics.assign(documents, found), quality.score(documents, graded, {'text': 'prose'}), ngram.score(documents, ngram.fit(documents))
print(found.digest(), graded.digest())
print(hashlib.sha256(repr([t.to_pylist() for t in given]).encode()).hexdigest())
"""


def test_hash_seeds_and_threads_change_nothing(four, tmp_path):
    path = tmp_path / 'documents.arrow'
    with pa.ipc.new_file(path, four[0].schema) as f:
        f.write_table(four[0])
    said = set()
    for seed, threads in (('1', '1'), ('2', '2')):
        environment = {
            **os.environ,
            'PYTHONHASHSEED': seed,
            'OMP_NUM_THREADS': threads,
            'OPENBLAS_NUM_THREADS': threads,
        }
        done = subprocess.run([sys.executable, '-c', PROGRAM, path], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        said.add(done.stdout)
    assert len(said) == 1


def test_what_was_changed_on_disk_is_refused(four, found, model, tmp_path):
    topics.write(tmp_path, found)
    assert topics.read(tmp_path).digest() == found.digest()
    assert topics.assign(four[0], topics.read(tmp_path)).equals(topics.assign(four[0], found))
    npz, about = (tmp_path / 'topics.npz').read_bytes(), (tmp_path / 'topics.json').read_text()
    rng = np.random.default_rng(0)
    unsafe = io.BytesIO()
    np.savez(unsafe, kept=np.array([{'a': 1}], dtype=object))
    bad = [npz[: len(npz) // 2], b'', unsafe.getvalue()]
    for at in rng.integers(0, len(npz), 40):
        bad.append(npz[:at] + bytes([npz[at] ^ 1]) + npz[at + 1 :])
    for data in bad:
        (tmp_path / 'topics.npz').write_bytes(data)
        with pytest.raises(IntegrityError):
            topics.read(tmp_path)
    (tmp_path / 'topics.npz').write_bytes(npz)
    for text in (about.replace('42', '43'), '{}', 'null', about[:100]):
        (tmp_path / 'topics.json').write_text(text)
        with pytest.raises(IntegrityError):
            topics.read(tmp_path)
    quality.write(tmp_path / 'quality.json', model)
    assert quality.read(tmp_path / 'quality.json').digest() == model.digest()
    stated = json.loads((tmp_path / 'quality.json').read_text())
    stated['kinds']['prose']['base'] += 1
    (tmp_path / 'quality.json').write_text(json.dumps(stated))
    with pytest.raises(IntegrityError):
        quality.read(tmp_path / 'quality.json')


# --- quality

CONCERT = """The singer opened her tour in Leeds on Friday with a set that ran for almost three hours. Fans had queued since the morning, some of
them in the costumes of her last video, and they knew every word.
She began alone at the piano, told a long and funny story about a lost suitcase, and only then let the band come on. The new songs are louder
than the old ones, and better for it.
By the time the confetti fell, even the security staff were dancing. "I have waited four years for this," said a man of sixty with glitter in his
beard, and he was not the only one. She plays Glasgow tomorrow, and Dublin on Sunday."""
SPAM = (
    """cheap concert tickets, best concert tickets online, buy tour tickets Leeds, pop singer tour tickets cheap, concert tickets discount
best price tour tickets, Leeds concert tickets free, buy now pop concert tickets, tickets near me, cheap tour tickets Leeds, order now!!!
http://www.cheap-concert-tickets.example concert tickets tour tickets cheap tickets Leeds tickets best tickets online tickets buy tickets"""
    * 2
)
SCANNED = """Tlie s1nger op cned hcr t0ur 1n Le^ds 0n Fri day w!th a s et tliat r@n f0r alrn0st tlirec h0urs. F@ns li@d qucu ed s!nce tlic m0rn|ng, s0mc
0f tlicm ~ ii1 tlie c0stu rnes 0f hcr 1@st vidc0, @nd tlicy kncw ev *ery w0rd. Slie bcg@n a10ne @t tlie p!an0, t0ld @ 10ng ^nd fuu|ny st0ry ab0ut
@ l0st su!tc@sc, @nd 0n1y tlicn l~et tlie b@nd c0me 0n. Tlie n~ew s0ngs @re l0uder tli@n tlie 0ld 0ncs, @nd bett~er f0r 1t. By tlie t!me"""
CODE = '''import math


def distance(a, b):
    """The distance between two points of the plane, each a pair of numbers."""
    width, height = a[0] - b[0], a[1] - b[1]
    # hypot does not overflow where the square would
    return math.hypot(width, height)


def perimeter(points):
    """The length of the closed line through all points in their order."""
    total = 0.0
    for here, there in zip(points, points[1:] + points[:1]):
        total += distance(here, there)
    return total


class Route:
    """Points in an order, with the name of each."""

    def __init__(self, names, points):
        if len(names) != len(points):
            raise ValueError(f"{len(names)} names for {len(points)} points")
        self.names, self.points = names, points

    def longest(self):
        """The two neighbours that lie farthest apart."""
        pairs = list(zip(self.names, self.names[1:]))
        return max(pairs, key=lambda pair: self.between(*pair))
'''


def broken(code, seed=0):
    "Brackets lost, indentation shuffled."
    rng = np.random.default_rng(seed)
    code = ''.join(c for c in code if c not in '()[]:' or rng.random() > 0.4)
    return '\n'.join(' ' * int(rng.integers(0, 9)) + line.strip() for line in code.split('\n'))


def test_form_is_judged_and_code_as_code(model):
    level = {n: quality.why(t, model, m)['quality'] for n, t, m in (
        ('concert', CONCERT, 'prose'), ('spam', SPAM, 'prose'), ('scanned', SCANNED, 'prose'), ('code', CODE, 'code'), ('broken', broken(CODE), 'code'),
    )}  # fmt: skip
    assert min(level['concert'], level['code']) >= 3 and max(level['spam'], level['scanned'], level['broken']) <= 1, (
        level
    )
    assert rubric.detect(CODE) == 'code' and rubric.detect(broken(CODE)) == 'code' and rubric.detect(CONCERT) == 'prose'


def test_the_subject_does_not_matter(model):
    swap = {
        'singer': 'lawyer',
        'tour': 'case',
        'piano': 'table',
        'songs': 'rules',
        'band': 'jury',
        'Fans': 'Men',
        'dancing': 'reading',
    }
    other = CONCERT
    for a, b in swap.items():
        other = other.replace(a, b)
    one, two = (quality.why(t, model, 'prose')['score'] for t in (CONCERT, other))
    assert abs(one - two) < 0.05


@pytest.mark.parametrize(('kind', 'text'), [('prose', CONCERT), ('code', CODE)])
def test_worse_damage_scores_lower(model, kind, text):
    for damage in rubric.DAMAGE[kind]:
        made = [rubric.damage(text, damage, s, seed) if s else text for s in (0, 2, 4) for seed in range(12)]
        given = quality.score(table(made), model, {'text': kind})['score'].to_numpy().reshape(3, 12).mean(1)
        assert given[0] > given[1] > given[2] and given[2] < 0.4, (damage, given)


def test_any_text_has_a_level(model):
    rng = np.random.default_rng(1)
    strange = [
        '',
        ' ',
        '\n\n',
        'a',
        '\ufffd' * 50,
        'é' * 500,
        '{' * 9999,
        'x' * 200_000,
        '\t',
        '漢字' * 40,
        '0 ' * 3000,
        '\x00\x01',
    ]
    strange += [''.join(map(chr, rng.integers(1, 0x2FFF, 300))) for _ in range(20)]
    for kind in (*rubric.MODALITIES, ''):
        given = quality.score(table(strange), model, {'text': kind} if kind else {})
        score, level = given['score'].to_numpy(), given['quality'].to_numpy()
        assert ((score >= 0) & (score <= 1)).all() and (level == np.searchsorted(quality.EDGES, score, 'right')).all()
    assert quality.score(table([]), model).num_rows == 0
    assert [quality.WEIGHTS[q] for q in range(5)] == [0.01, 0.1, 1, 3, 10]


def test_a_place_says_bucket_and_why(found, model):
    said = quality.place(CONCERT, found, model)
    assert (
        said['bucket'] == f't{said["topic"]["topic"]:02d}q{said["quality"]["quality"]}'
        and said['quality']['modality'] == 'prose'
    )
    assert json.loads(json.dumps(said)) and set(said['topic']['words']) & set(SUBJECTS['music'].split())


# --- servers


@contextmanager
def server(answer):
    "A server that answers POST by `answer(path, body, headers) -> (status, bytes)`, or does what it is told; its address and what it saw."
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
            seen.append((self.path, body, dict(self.headers)))
            found = answer(self.path, body, len(seen))
            if callable(found):
                return found(self)
            status, data = found
            self.send_response(status)
            self.send_header('Content-Length', str(len(data)))
            if status in (301, 302, 307, 308):
                self.send_header('Location', data.decode())
            self.end_headers()
            self.wfile.write(data)

    running = ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    running.daemon_threads = True
    threading.Thread(target=running.serve_forever, daemon=True).start()
    try:
        yield f'http://127.0.0.1:{running.server_port}/v1', seen
    finally:
        running.shutdown()
        running.server_close()


def said(text):
    "A chat completion that says `text`."
    return 200, json.dumps({'choices': [{'message': {'role': 'assistant', 'content': text}}]}).encode()


def slow(handler):
    time.sleep(3)


def drip(handler):
    handler.send_response(200)
    handler.send_header('Content-Length', '1000')
    handler.end_headers()
    for _ in range(30):
        handler.wfile.write(b' ')
        handler.wfile.flush()
        time.sleep(0.1)


def half(handler):
    handler.send_response(200)
    handler.send_header('Content-Length', '1000')
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')


FAULTS = [
    (said('Certainly! This text is lovely.'), 'no grade', 1), (said('{"grade": 11}'), 'no grade from 0 to 4', 1), (said('{"grade": "3"}'), 'no grade from 0 to 4', 1),
    (said('{"grade": 3'), 'no grade', 1), (said(None), 'no message', 1), ((200, b'{}'), 'no message', 1), ((200, b'<html>'), 'not JSON', 1), ((200, b'[1]'), 'not an object', 1),
    ((200, b''), 'not JSON', 1), ((200, b'\xff\xfe'), 'not JSON', 1), ((404, b'none'), 'status 404', 1), ((401, b'who?'), 'status 401', 1), ((503, b'busy'), 'status 503', 2),
    ((429, b'slower'), 'status 429', 2), (slow, 'timeout', 2), (drip, 'timeout', 2), (half, 'no connection', 2),
]  # fmt: skip


@pytest.mark.parametrize(('answer', 'fault', 'tries'), FAULTS, ids=[f'{i}-{f[1]}' for i, f in enumerate(FAULTS)])
def test_an_answer_is_read_whole_or_is_none(answer, fault, tries):
    with server(lambda path, body, n: answer) as (address, seen):
        found = Client(address, 'judge', timeout=0.5, tries=2, pause=0.01).grade(quality.question('text', 'prose'))
        assert (found.grade, found.fault) == (-1, fault) and len(seen) == tries


def test_a_redirect_is_not_followed_and_the_key_stays(monkeypatch):
    monkeypatch.setenv('LADDERBOOK_API_KEY', 'sk-of-the-test')
    with (
        server(lambda *_: said('{"grade": 4}')) as (elsewhere, other),
        server(lambda *_: (307, elsewhere.encode())) as (address, seen),
    ):
        found = Client(address, 'judge', pause=0.01).grade([])
        assert found.fault == 'status 307' and not other and seen[0][2]['Authorization'] == 'Bearer sk-of-the-test'
        assert 'sk-of-the-test' not in repr(Client(address, 'judge'))


def test_labels_by_a_model_behind_an_address(tiny):
    def judge(path, body, n):
        text = body['messages'][1]['content']
        if n % 5 == 0:
            return said('I cannot grade this.')
        if n % 7 == 0:
            return 500, b''
        return said(f'Grade: {{"grade": {4 if len(text) > 1500 else 1}, "why": "length"}}')

    with server(judge) as (address, seen):
        labels, counts = quality.from_endpoint(tiny, Client(address, 'judge', tries=2, pause=0.0), CATEGORY, size=40)
    assert (
        counts['asked'] == len(labels) == counts['answered'] + sum(counts['refused'].values())
        and counts['refused']['no grade'] > 0
    )
    assert labels['label'].null_count == sum(counts['refused'].values()) and set(
        labels['label'].drop_null().to_pylist()
    ) == {1, 4}
    assert all(p == '/v1/chat/completions' and b['temperature'] == 0 for p, b, _ in seen)
    assert not any(s in b['messages'][0]['content'] + b['messages'][1]['content'] for _, b, _ in seen for s in CATEGORY)
    taught, own = quality.fit(tiny, CATEGORY, size=40, labels=labels), quality.fit(tiny, CATEGORY, size=40)
    assert taught.digest() != own.digest()
    assert quality.fit(tiny, CATEGORY, size=40, labels=labels).digest() == taught.digest()


def test_a_dead_server_is_said_and_no_label_made(tiny):
    with server(lambda *_: said('{"grade": 4}')) as (address, _):
        pass
    with pytest.raises(ResourceError, match='gave no answer 3 times in a row'):
        quality.from_endpoint(tiny, Client(address, 'judge', timeout=0.5, tries=2, pause=0.0), CATEGORY)
    with pytest.raises(UsageError):
        Client('file:///etc/passwd', 'judge')


def test_topics_on_served_vectors(four):
    documents, subject = four
    stock = {w: i for i, words in enumerate(SUBJECTS.values()) for w in words.split()}

    def embed(path, body, n):
        assert path == '/v1/embeddings'
        rows = []
        for i, text in enumerate(body['input']):
            v = (
                np.bincount([stock[w] for w in text.replace('.', '').split() if w in stock], minlength=4)
                + 0.01 * len(text) % 0.5
            )
            rows.append({'index': i, 'embedding': v.tolist()})
        return 200, json.dumps({'data': rows[::-1]}).encode()

    with server(embed) as (address, _):
        client = Client(address, 'vectors')
        found = topics.fit(documents, fine=8, topics=4, least=0.1, embed=client.embed, embedding='vectors')
        given = topics.assign(documents, found, client.embed)
        assert len({(s, t) for s, t in zip(subject, given['topic'].to_pylist(), strict=True)}) == 4
        assert (
            topics.why('The whale and the ship.', found, client.embed)['topic']
            == given['topic'][subject.index('sea')].as_py()
        )
    with pytest.raises(UsageError, match='vectors'):
        topics.assign(documents, found)
    with pytest.raises(UsageError):
        topics.fit(documents, fine=8, topics=4, least=0.1, embed=client.embed)
    for bad in (
        {'data': []},
        {'data': [{'index': 0, 'embedding': [1, None]}]},
        {'data': [{'index': 0, 'embedding': []}]},
        {},
    ):
        with server(lambda *_, bad=bad: (200, json.dumps(bad).encode())) as (address, _), pytest.raises(ResourceError):
            Client(address, 'vectors').embed(['text'])


# --- n-grams


def test_ten_buckets_are_equal_and_ordered(tiny):
    rng = np.random.default_rng(0)
    noise = [''.join(map(chr, rng.integers(97, 123, 2000))) for _ in range(12)]
    known = tiny['text'].to_pylist()
    documents = table(known + noise + [''])
    given = ngram.score(documents, ngram.fit(documents))
    bits, size = given['bits'].to_numpy(zero_copy_only=False), documents['bytes'].to_numpy()
    assert np.isnan(bits[-1]) and np.min(bits[len(known) : -1]) > np.quantile(bits[: len(known)], 0.9)
    ten = ngram.buckets(given, size)
    for b in range(9):
        assert np.max(bits[:-1][ten[:-1] == b], initial=0) <= np.min(bits[:-1][ten[:-1] > b])
    each = np.bincount(ten, size, 10)
    assert abs(each - size.sum() / 10).max() <= size.max()
    with pytest.raises(UsageError):
        ngram.fit(documents.slice(0, 1))
