"""The stages on a Ray cluster of two nodes: the same bytes as here, whatever the cuts, with a worker killed in the middle."""

import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pytest
from ladderbook.data import exact, near, shared
from ladderbook.data.cluster import Ray
from ladderbook.data.engine import LOCAL, Local

pytestmark = pytest.mark.end_to_end
WORDS = (
    'the of and to in a is that it was for on are as with his they at be this from have or by one had not but'.split()
)


@pytest.fixture(scope='module')
def cluster():
    ray = pytest.importorskip('ray')
    from ray.cluster_utils import Cluster

    found = Cluster(
        initialize_head=True,
        head_node_args={'num_cpus': 2, 'object_store_memory': 200_000_000, 'include_dashboard': False},
    )
    found.add_node(num_cpus=2, object_store_memory=200_000_000)
    here = {'env_vars': {'PYTHONPATH': str(Path(__file__).parent)}}  # workers import this file's functions
    ray.init(address=found.address, logging_level='ERROR', log_to_driver=False, runtime_env=here)
    assert sum(n['Alive'] for n in ray.nodes()) == 2
    yield ray
    ray.shutdown()
    found.shutdown()


@pytest.fixture(scope='module')
def documents():
    """Sixty texts of two sources with exact copies, near copies, and shared lines among them."""
    rng = np.random.default_rng(0)
    texts = ['\n'.join(' '.join(rng.choice(WORDS, 9)) for _ in range(30)) for _ in range(36)]
    texts += texts[:8] + [t.replace('the', 'a', 2) for t in texts[8:16]]
    texts += ['\n'.join(f'* {x}' for x in t.split('\n')[::-1][:20]) for t in texts[16:24]]
    ids = [f'{i:04d}' if texts.index(t) == i else f'{texts.index(t):04d}' for i, t in enumerate(texts)]
    source = ['one' if i < 30 else 'two' for i in range(len(texts))]
    columns = {
        'doc': [f'{s}/{i}' for i, s in enumerate(source)],
        'source': source,
        'domain': ['docs'] * len(texts),
        'path': [str(i) for i in range(len(texts))],
        'text': pa.array(texts, pa.large_string()),
        'id': ids,
        'bytes': [len(t) for t in texts],
        'licence': ['MIT'] * len(texts),
        'year': pa.array([None] * len(texts), pa.int32()),
    }
    return pa.table(columns)


def written(table):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as out:
        out.write_table(table.combine_chunks())
    return sink.getvalue().to_pybytes()


def words(block):
    return pa.table({'doc': block['doc'], 'n': pa.array([len(x.as_py().split()) for x in block['text']], pa.int32())})


def slowly(block):
    time.sleep(0.5)
    return words(block)


def first(groups):
    return groups.group_by('source', use_threads=False).aggregate([('doc', 'first'), ('bytes', 'sum')])


def test_the_three_operations_give_the_same_bytes(cluster, documents):
    engine = Ray(parts=3, rows=7)
    counted = engine.map(documents, words)
    assert written(counted) == written(LOCAL.map(documents, words)) == written(Ray(rows=1000).map(documents, words))
    assert written(engine.group(documents, 'source', first)) == written(LOCAL.group(documents, 'source', first))
    half = counted.slice(5, 20)
    assert written(engine.join(documents, half, 'doc')) == written(LOCAL.join(documents, half, 'doc'))
    empty = documents.slice(0, 0)
    assert written(Ray().map(empty, words)) == written(LOCAL.map(empty, words))


def test_the_stages_give_the_same_bytes(cluster, documents):
    found = documents
    for stage in (exact.exact, near.near, shared.shared):
        here, there = stage(found, engine=Local(rows=9)), stage(found, engine=Ray(parts=2, rows=13))
        assert written(here) == written(there)
        gone = [r != '' for r in here['removed'].to_pylist()]
        assert any(gone), stage
        found = found.filter(pa.array([not g for g in gone]))


def test_a_killed_worker_changes_nothing(cluster, documents):
    killed = []

    def kill():
        for _ in range(2400):  # two minutes: on a busy machine a worker takes long to start
            for p in psutil.process_iter(['cmdline']):
                if 'MapBatches' in ' '.join(p.info['cmdline'] or []):
                    p.kill()
                    killed.append(p.pid)
                    return
            time.sleep(0.05)

    other = threading.Thread(target=kill)
    other.start()
    there = Ray(rows=5).map(documents, slowly)
    other.join()
    assert killed, 'no worker was seen at work'
    assert written(there) == written(LOCAL.map(documents, words))
