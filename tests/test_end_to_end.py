"""The whole way of a user: from a bare clone, without a network, to a record that verifies; and without a clone."""

import json
import os
import shutil
import subprocess
import sys
import zipfile

import pytest
from ladderbook.data import benchmarks
from ladderbook.data.sources import SOURCES, plan
from ladderbook.settings import load
from test_house import TOOLS, copy_of_the_clone

pytestmark = pytest.mark.end_to_end
RUNG = 'desk-micro'

# run inside the namespace: loopback up (the notebook's kernel talks over it), nothing else to be reached
ALONE = """
import fcntl, os, socket, struct, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
fcntl.ioctl(s, 0x8914, struct.pack('16sh', b'lo', 0x1 | 0x40))
assert [name for _, name in socket.if_nameindex() if name == 'lo']
try:
    socket.create_connection(('192.0.2.1', 443), timeout=5)
    sys.exit('there is a route')
except OSError as e:
    assert e.errno == 101, e  # network is unreachable
os.execvp(sys.argv[1], sys.argv[1:])
"""


def say(*args, cwd, **env):
    "Run a command; its whole output when it fails."
    clean = {k: v for k, v in os.environ.items() if not k.startswith(('LADDERBOOK_', 'JAX_', 'PYTEST_'))}
    done = subprocess.run(
        [str(a) for a in args], cwd=cwd, env=clean | env, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, f'{done.stdout[-4000:]}\n{done.stderr[-4000:]}'
    return done.stdout


def namespace():
    "The command that enters a network namespace of one's own, or None where that is not allowed."
    for command in (['unshare', '-n'], ['unshare', '-rn']):
        if shutil.which('unshare') and subprocess.run([*command, 'true'], capture_output=True).returncode == 0:
            return command
    return None


@pytest.fixture(scope='module')
def cache(tmp_path_factory):
    "One cache for the module: the corpus is built once, by the test that runs first."
    return str(tmp_path_factory.mktemp('cache'))


@pytest.fixture(scope='module')
def offline(tmp_path_factory):
    "What `make fetch` gathers."
    folder = tmp_path_factory.mktemp('offline')
    print(say(sys.executable, TOOLS / 'offline.py', folder, cwd=folder.parent))
    return folder


def record_of(folder):
    "The only run under `folder`, with its hashes checked."
    from ladderbook import record

    (run,) = (folder / 'artifacts' / 'runs').glob(f'{RUNG}-0-*')
    record.verify(run)
    found = record.read_run(run)
    assert found['observed']['status'] == 'finished' and found['observed']['verified']
    return run, found


def test_fetched_folder_is_under_the_promised_size(offline):
    manifest = json.loads((offline / 'manifest.json').read_text())
    size = sum(row['size'] for row in manifest['files'].values())
    assert 100e6 < size < 500e6
    assert any(name.startswith('wheels/jaxlib-') for name in manifest['files'])
    wanted = plan(load().data.corpus)
    files = {SOURCES[n].file for n in (*wanted.unseen, *wanted.sources)} | {s.file for s in benchmarks.packages()}
    assert {n.removeprefix('sources/') for n in manifest['files'] if n.startswith('sources/')} == files


def test_replay_without_a_network(offline, cache, tmp_path):
    enter = namespace()
    if enter is None:
        pytest.skip('this user may not make a network namespace (unshare -n, unshare -rn): run as root to try it')
    clone = copy_of_the_clone(tmp_path)
    command = ['make', 'replay', f'OFFLINE={offline}', f'RUNG={RUNG}']
    said = say(*enter, sys.executable, '-c', ALONE, *command, cwd=clone, LADDERBOOK_PATHS_CACHE=cache)
    assert 'Python 3.' in said and 'found at' in said
    run, _ = record_of(clone)
    assert run.name in said and 'macro' in said
    assert (run / 'rung.ipynb').is_file() and (run / 'events.jsonl').is_file()
    again = say('make', 'train', cwd=clone)
    assert 'making' not in again, 'the environment is made once per lock'


def test_replay_without_a_clone(offline, cache, tmp_path):
    source, out, site, empty = (tmp_path / n for n in ('source', 'dist', 'site', 'empty'))
    empty.mkdir()
    copy_of_the_clone(source)
    say(sys.executable, '-m', 'build', '--no-isolation', '--wheel', '--outdir', out, cwd=source)
    zipfile.ZipFile(next(out.glob('*.whl'))).extractall(site)
    code = 'import sys; from ladderbook.cli import main; sys.exit(main())'
    command, env = [sys.executable, '-c', code], {'PYTHONPATH': str(site), 'LADDERBOOK_PATHS_CACHE': cache}
    say(*command, 'data', 'build', '--source-dir', offline / 'sources', cwd=empty, **env)
    said = say(*command, 'replay', RUNG, '--yes', cwd=empty, **env)
    run, _ = record_of(empty)
    assert run.name in said
