"""The house itself: locks, lint, packaging, clean, and the commands that need no network."""

import configparser
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import warnings
import zipfile
from pathlib import Path

import jaxtyping
import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / 'tools'
LOCKS = ROOT / 'containers' / 'locks'


def tool(name):
    "A script of tools/ as a module."
    sys.path.insert(0, str(TOOLS))
    try:
        spec = importlib.util.spec_from_file_location(f'tools_{name}', TOOLS / f'{name}.py')
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(TOOLS))


def run(*args, cwd=ROOT, **env):
    return subprocess.run(
        [str(a) for a in args], cwd=cwd, capture_output=True, text=True, env={**os.environ, **env}, timeout=300
    )


def notebook(*cells, count=None):
    "A clean notebook of code cells; the first is Markdown."
    made = []
    for n, text in enumerate(cells):
        cell = {
            'cell_type': 'code' if n else 'markdown',
            'id': f'cell{n}',
            'metadata': {},
            'source': text.splitlines(True),
        }
        made.append(cell | ({'outputs': [], 'execution_count': count} if n else {}))
    kernel = {'display_name': 'python3', 'language': 'python', 'name': 'python3'}
    return {'cells': made, 'metadata': {'kernelspec': kernel}, 'nbformat': 4, 'nbformat_minor': 5}


def write_notebook(path, book):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(book, indent=1, sort_keys=True) + '\n')


# --- the files at the top agree with each other


def project():
    return tomllib.loads((ROOT / 'pyproject.toml').read_text())


def test_settings_and_project_agree():
    from ladderbook import __version__, settings

    table = project()
    assert settings.PACKAGE == ROOT / table['tool']['nbdev']['lib_path']
    assert settings.load().home == ROOT
    citation = yaml.safe_load((ROOT / 'CITATION.cff').read_text())
    assert citation['cff-version'] == '1.2.0'
    assert citation['version'] == __version__
    assert citation['license'] == table['project']['license'] == 'Apache-2.0'
    assert citation['type'] == 'software' and citation['authors'] and citation['title'] and citation['message']


def test_defaults_exist():
    from ladderbook.data.sources import CORPORA
    from ladderbook.recipe.rungs import NAMES
    from ladderbook.settings import load

    assert load().data.corpus in CORPORA
    assert load().replay.rung in NAMES
    assert f'`{load().replay.rung}`' in (ROOT / 'README.md').read_text()


def test_default_names_stand_in_settings_alone():
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / 'settings.ini')
    names = [
        parser['environments']['serve'],
        parser['images']['train'],
        parser['images']['gpu'],
        parser['paths']['runs'],
    ]
    for path in [ROOT / 'Makefile', *TOOLS.iterdir(), *(ROOT / 'package').rglob('*.py')]:
        if path.is_file():
            assert not [n for n in names if f"'{n}'" in path.read_text()], path


def test_licence_is_the_whole_text():
    text = (ROOT / 'LICENSE').read_text()
    assert 'Version 2.0, January 2004' in text and 'END OF TERMS AND CONDITIONS' in text and len(text) > 11_000


def test_references_are_whole_and_used():
    text = (ROOT / 'references.bib').read_text()
    entries = dict(re.findall(r'^@\w+\{(\w+),\n(.*?)\n\}$', text, re.MULTILINE | re.DOTALL))
    assert len(entries) == text.count('\n@') >= 35
    for key, body in entries.items():
        assert all(re.search(rf'\b{field} = ', body) for field in ('title', 'author', 'year')), key
        assert re.search(r'eprint = \{\d{4}\.\d{4,5}\}|url = \{https://|journal = |booktitle = ', body), key
        assert body.count('{') == body.count('}'), key
    cited = set(re.findall(r'\[([a-z]+\d\w*)\]', (ROOT / 'CREDITS.md').read_text()))
    assert cited and cited <= set(entries), cited - set(entries)


# --- locks and environment


def requirements(name):
    "The requirements of a lock: (name, version, number of hashes)."
    text = re.sub(r'\\\n', ' ', (LOCKS / name).read_text())
    lines = [x for x in text.splitlines() if x.strip() and not x.lstrip().startswith('#')]
    found = []
    for line in lines:
        assert (m := re.match(r'([\w.-]+)==([^\s;]+)', line)), line
        found.append((m[1], m[2], len(re.findall(r'--hash=sha256:[0-9a-f]{64}\b', line))))
    return found


@pytest.mark.parametrize('lock', sorted(p.name for p in LOCKS.glob('*.lock')))
def test_every_line_of_a_lock_is_pinned_and_hashed(lock):
    rows = requirements(lock)
    assert len(rows) > 20
    assert not [r for r in rows if not r[2]]
    assert '://' not in (LOCKS / lock).read_text()


def test_dev_lock_holds_the_train_lock():
    train = {(n, v) for n, v, _ in requirements('train.lock')}
    assert train < {(n, v) for n, v, _ in requirements('dev.lock')}
    assert {'jax', 'flax', 'optax', 'grain', 'papermill', 'setuptools'} <= {n for n, _ in train}


def test_lock_gives_each_python_its_jax():
    lock = tool('lock')
    rows = lock.pins((LOCKS / 'train.lock').read_text())
    assert lock.versions(rows, '3.11.7')['jax'].startswith('0.10.')
    for python in ('3.12.1', '3.13.0'):
        assert lock.versions(rows, python)['jax'].startswith('0.12.')


def test_lock_lists_the_run_identities_it_outdates(tmp_path):
    lock = tool('lock')
    rows = lock.pins(
        'jax==0.10.2 ; python_full_version < "3.12" \\\n    --hash=x\njax==0.12.0 ; python_full_version >= "3.12" \\\n'
    )
    assert [r[:2] for r in rows] == [('jax', '0.10.2'), ('jax', '0.12.0')]
    for name, python, version in (
        ('same', '3.11.7', '0.10.2'),
        ('moved', '3.11.7', '0.10.1'),
        ('later', '3.12.1', '0.12.0'),
    ):
        (tmp_path / name).mkdir()
        identity = {'python': python, 'versions': {'jax': version, 'optax': 'absent'}}
        (tmp_path / name / 'run.json').write_text(json.dumps({'identity': identity}))
    assert lock.outdated(tmp_path, rows) == [('moved', 'jax', '0.10.1', '0.10.2')]


def test_python_is_found_past_a_shim_that_fails(tmp_path):
    shims = {'python3.13': 'exit 127', 'python3.12': f'exec {sys.executable} "$@"', 'python3.11': 'exit 1'}
    for name, body in shims.items():
        (tmp_path / name).write_text(f'#!/bin/sh\n{body}\n')
        (tmp_path / name).chmod(0o755)
    found = run('sh', TOOLS / 'python.sh', PATH=f'{tmp_path}:{os.environ["PATH"]}')
    assert found.returncode == 0
    assert Path(found.stdout.strip()).samefile(sys.executable)


def test_a_python_named_is_that_one_or_none(tmp_path):
    (tmp_path / 'python3').write_text('#!/bin/sh\nexit 1\n')
    (tmp_path / 'python3').chmod(0o755)
    assert Path(run('sh', TOOLS / 'python.sh', sys.executable).stdout.strip()).samefile(sys.executable)
    assert run('sh', TOOLS / 'python.sh', tmp_path / 'python3').returncode == 1
    done = run('make', 'help', f'PYTHON={tmp_path}/python3')
    assert done.returncode == 2 and f'found at {tmp_path}/python3' in done.stderr


def test_no_python_is_said_plainly(tmp_path):
    for name in ('sh', 'sed', 'awk', 'make'):
        (tmp_path / name).symlink_to(shutil.which(name))
    done = run('make', '-f', ROOT / 'Makefile', 'help', PATH=str(tmp_path))
    assert done.returncode == 2
    assert 'no working Python >= 3.11' in done.stderr and 'PYTHON=' in done.stderr


def test_environment_is_out_of_step_when_the_lock_changes(tmp_path, monkeypatch):
    environment = tool('environment')
    monkeypatch.setattr(environment, 'LOCKS', tmp_path)
    monkeypatch.setattr(environment, 'works', lambda folder: True)
    for name in ('train', 'dev'):
        (tmp_path / f'{name}.lock').write_text('a==1 --hash=sha256:0\n')
    (tmp_path / 'ladderbook.json').write_text(json.dumps(environment.wanted('dev')))
    assert environment.ready(tmp_path, 'dev')
    (tmp_path / 'dev.lock').write_text('a==2 --hash=sha256:0\n')
    assert not environment.ready(tmp_path, 'dev')


def test_environment_with_the_tests_keeps_them_when_only_training_is_asked_for(tmp_path):
    environment = tool('environment')
    assert environment.rather(tmp_path, 'train') == 'train'
    for lock, asked, used in (
        ('dev', 'train', 'dev'),
        ('dev', 'dev', 'dev'),
        ('train', 'train', 'train'),
        ('train', 'dev', 'dev'),
    ):
        (tmp_path / 'ladderbook.json').write_text(json.dumps({'lock': lock}))
        assert environment.rather(tmp_path, asked) == used


# --- the folder for a machine without a network


@pytest.fixture
def offline(tmp_path):
    module = tool('offline')
    (tmp_path / 'wheels').mkdir()
    (tmp_path / 'wheels' / 'a.whl').write_bytes(b'wheel')
    module.write_manifest(tmp_path)
    module.verify(tmp_path)
    return module, tmp_path


def refused(module, folder, capsys):
    with pytest.raises(SystemExit) as e:
        module.verify(folder)
    return e.value.code, capsys.readouterr().err


def test_offline_folder_with_another_file_is_refused(offline, capsys):
    module, folder = offline
    (folder / 'wheels' / 'a.whl').write_bytes(b'other')
    code, said = refused(module, folder, capsys)
    assert code == 3 and 'a.whl' in said and 'sha256 differs' in said


def test_offline_folder_with_a_file_missing_is_refused(offline, capsys):
    module, folder = offline
    (folder / 'wheels' / 'a.whl').unlink()
    code, said = refused(module, folder, capsys)
    assert code == 3 and 'a.whl' in said and 'not there' in said


@pytest.mark.parametrize('field, word', [('platform', 'was fetched for python2'), ('lock', 'another containers/locks')])
def test_offline_folder_of_another_machine_or_lock_is_drift(offline, capsys, field, word):
    module, folder = offline
    manifest = json.loads((folder / 'manifest.json').read_text())
    (folder / 'manifest.json').write_text(json.dumps(manifest | {field: 'python2'}))
    code, said = refused(module, folder, capsys)
    assert code == 4 and word in said


def test_offline_folder_without_manifest_says_how_to_make_one(tmp_path, capsys):
    code, said = refused(tool('offline'), tmp_path, capsys)
    assert code == 5 and f'make fetch DIR={tmp_path}' in said


# --- lint finds what is planted

GOOD = ('# A\n\n> One line.', '#| default_exp one', "#| export\ndef f():\n    'A function.'\n    return 1", 'f()')


@pytest.fixture(scope='module')
def sound(tmp_path_factory):
    "A small project that lint has nothing to say about."
    root = tmp_path_factory.mktemp('sound')
    shutil.copy2(ROOT / 'pyproject.toml', root)
    (root / 'package' / 'ladderbook').mkdir(parents=True)
    (root / 'package' / 'ladderbook' / '__init__.py').write_text("__version__ = '0'\n")
    write_notebook(root / 'nbs' / '01_one.ipynb', notebook(*GOOD))
    write_notebook(root / 'nbs' / 'index.ipynb', notebook('# B\n\n> One line.\n\n[one](01_one.ipynb)'))
    (root / 'README.md').write_text('# B\n\n> One line.\n\n[one](nbs/01_one.ipynb)\n')
    bin = Path(sys.executable).parent
    for command in (
        ['nbdev-clean'],
        ['ruff', 'format', '-q', 'nbs'],
        ['nbdev-export'],
    ):
        done = run(bin / command[0], *command[1:], cwd=root)
        assert done.returncode == 0, done.stderr
    return root


@pytest.fixture
def planted(sound, tmp_path):
    shutil.copytree(sound, tmp_path / 'p')
    return tmp_path / 'p'


def findings(root, *checks):
    done = run(sys.executable, TOOLS / 'lint.py', *checks, '--root', root)
    assert 'Traceback' not in done.stderr, done.stderr
    assert done.returncode == ('nothing to say' not in done.stdout)
    return done.stdout


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_lint_is_silent_on_a_sound_project(planted):
    assert 'nothing to say' in findings(planted)


def test_lint_finds_an_unclean_notebook(planted):
    edit(planted / 'nbs' / '01_one.ipynb', '"execution_count": null', '"execution_count": 7')
    assert 'nbs/01_one.ipynb: not clean' in findings(planted, 'compiled')


def test_lint_finds_a_stale_export(planted):
    edit(planted / 'package' / 'ladderbook' / 'one.py', 'return 1', 'return 2')
    assert 'package/ladderbook/one.py: not in step' in findings(planted, 'compiled')


def test_lint_finds_a_module_without_notebook(planted):
    edit(planted / 'nbs' / '01_one.ipynb', 'return 1', 'return 3')
    assert 'package/ladderbook/one.py: not in step' in findings(planted, 'compiled')


def test_lint_finds_an_unused_import_and_bad_format(planted):
    module = planted / 'package' / 'ladderbook' / 'one.py'
    module.write_text(module.read_text() + 'import os\n')
    edit(planted / 'nbs' / '01_one.ipynb', '"f()"', '"f( )"')
    said = findings(planted, 'style')
    assert 'F401' in said and 'one.py' in said
    assert '01_one.ipynb' in said and 'would be reformatted' in said


def test_lint_finds_an_unused_function(planted):
    edit(planted / 'nbs' / '01_one.ipynb', '"f()"', '"1"')
    assert "unused function 'f'" in findings(planted, 'unused')


def test_lint_finds_a_stale_readme(planted):
    edit(planted / 'README.md', 'One line', 'Two lines')
    assert 'README.md: not in step' in findings(planted, 'readme')


def test_lint_finds_a_dead_link(planted):
    edit(planted / 'nbs' / 'index.ipynb', '01_one.ipynb', '02_two.ipynb')
    assert 'links to 02_two.ipynb' in findings(planted, 'links')


def test_lint_finds_faults_of_a_notebook(planted):
    book = notebook('No title.', '#| export\n' + 'x = 1\n' * 401)
    book['cells'].append(book['cells'][1])
    write_notebook(planted / 'nbs' / '03_long.ipynb', book)
    said = findings(planted, 'books')
    assert 'cell id cell1 is used twice' in said
    assert 'does not open with a title' in said
    assert 'at most 400' in said


def test_lint_finds_faults_of_structure(planted):
    (planted / 'package' / 'ladderbook' / 'data').mkdir()
    body = '\n'.join(
        ['from ..model import lm', 'from ladderbook.recipe import spec', 'def long():', *['    spec, lm'] * 60]
    )
    (planted / 'package' / 'ladderbook' / 'data' / 'x.py').write_text(body + '\n')
    said = findings(planted, 'structure')
    assert 'imports ladderbook.model.lm' in said
    assert 'recipe.spec' not in said
    assert 'long has 61 lines' in said
    assert 'long has no docstring' in said


def test_lint_finds_words_and_weights_that_do_not_belong(planted):
    home, host = '/'.join(['', 'home', 'somebody', 'x']), '.'.join(['pypi', 'org'])
    (planted / 'a.txt').write_text(f'ok\nlook in {home}\nask {host}\n')
    (planted / 'b.bin').write_bytes(b'\xff' * 5_000_001)
    said = findings(planted, 'words')
    assert 'a.txt:2: names a path of one machine' in said
    assert 'a.txt:3: names a registry host' in said
    assert 'b.bin: 5000001 bytes' in said


# --- notebooks as tests


@pytest.mark.parametrize(
    'cell, word',
    [
        ("import warnings\n\nwarnings.warn('careless', stacklevel=1)", 'careless'),
        ("from ladderbook.files import sha256_bytes\n\nsha256_bytes('text')", 'TypeCheckError'),
        (
            "import numpy as np\nfrom jaxtyping import Float\n\n\ndef g(x: Float[np.ndarray, 'A B']):\n    return x\n\n\ng(np.ones(3))",
            'TypeCheckError',
        ),
        ('assert 1 == 2', 'AssertionError'),
    ],
)
def test_a_notebook_fails_by_its_fault(tmp_path, cell, word):
    shutil.copy2(ROOT / 'pyproject.toml', tmp_path)
    write_notebook(tmp_path / 'nbs' / 'x.ipynb', notebook('# X\n\n> x.', *cell.split('\n\n', 1)))
    done = run(sys.executable, TOOLS / 'check_notebook.py', 'nbs/x.ipynb', cwd=tmp_path)
    assert done.returncode == 1
    assert word in done.stderr


def test_types_and_warnings_of_the_package_are_checked_here_too():
    from ladderbook.files import sha256_bytes

    with pytest.raises(jaxtyping.TypeCheckError):
        sha256_bytes('text')
    with pytest.raises(UserWarning, match='careless'):
        warnings.warn_explicit('careless', UserWarning, 'files.py', 1, module='ladderbook.files')


# --- packaging


def copy_of_the_clone(target):
    "What git would hand out, uncommitted changes included."
    for path in tool('lint').git_files(ROOT):
        (target / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target / path.relative_to(ROOT))
    return target


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
    "The wheel, built from the sdist, as an index would get it."
    source, out = copy_of_the_clone(tmp_path_factory.mktemp('source')), tmp_path_factory.mktemp('dist')
    done = run(sys.executable, '-m', 'build', '--no-isolation', '--outdir', out, cwd=source)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(list(out.glob('*.tar.gz'))) == 1
    return next(out.glob('*.whl'))


def test_wheel_carries_the_package_and_the_bundle(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {p.relative_to(ROOT / 'package').as_posix() for p in (ROOT / 'package').rglob('*.py')}
    assert modules <= names
    held = {n.removeprefix('ladderbook/_bundle/') for n in names if n.startswith('ladderbook/_bundle/')}
    assert {'settings.ini', 'containers/locks/train.lock', 'nbs/rungs/desk.ipynb'} <= held
    assert {p.relative_to(ROOT).as_posix() for p in (ROOT / 'tests' / 'data' / 'tiny').glob('[!.]*')} <= held
    assert not [n for n in names if re.match(r'(tests|nbs|tools)/', n)]
    text = zipfile.ZipFile(wheel).read(next(n for n in names if n.endswith('entry_points.txt'))).decode()
    assert 'ladderbook = ladderbook.cli:main' in text


def test_whatever_the_package_asks_of_the_bundle_is_in_the_wheel(wheel):
    text = '\n'.join(p.read_text() for p in (ROOT / 'package').rglob('*.py'))
    parts = {tuple(re.findall(r"'([^']*)'", args)) for args in re.findall(r"bundled\(((?:'[^']*'(?:, )?)+)", text)}
    assert {p[0] for p in parts} >= {'settings.ini', 'containers', 'nbs'}
    names = zipfile.ZipFile(wheel).namelist()
    for path in parts:
        assert any(f'{n}/'.startswith(f'ladderbook/_bundle/{"/".join(path)}/') for n in names), path


def test_wheel_works_from_an_empty_folder(wheel, tmp_path):
    site, empty = tmp_path / 'site', tmp_path / 'empty'
    zipfile.ZipFile(wheel).extractall(site)
    empty.mkdir()
    code = 'import sys, ladderbook; print(ladderbook.__file__); from ladderbook.cli import main; sys.exit(main())'
    done = run(sys.executable, '-c', code, 'plan', 'desk-micro', cwd=empty, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    assert str(site) in done.stdout and 'parameters' in done.stdout


# --- clean


def test_clean_lists_and_removes_only_when_told(tmp_path):
    shutil.copytree(TOOLS, tmp_path / 'tools', ignore=shutil.ignore_patterns('__pycache__'))
    shutil.copy2(ROOT / 'settings.ini', tmp_path)
    kept, run_, cache = tmp_path / 'nbs' / 'a', tmp_path / 'artifacts' / 'runs' / 'r' / 'a', tmp_path / '.cache' / 'a'
    for path in (kept, run_, cache):
        path.parent.mkdir(parents=True)
        path.write_bytes(b'x' * 2_000_000)
    listed = run(sys.executable, 'tools/clean.py', cwd=tmp_path, PYTHONDONTWRITEBYTECODE='1')
    assert re.search(r'2\.0 MB +\.cache', listed.stdout) and 'nothing was removed' in listed.stdout
    assert '2.0 MB  artifacts/runs/r  (kept; RUNS=1 removes it)' in listed.stdout
    assert '2.0 MB  of runs, kept' in listed.stdout and '2.0 MB  in all' in listed.stdout
    assert kept.exists() and run_.exists() and cache.exists()
    done = run(sys.executable, 'tools/clean.py', '--yes', cwd=tmp_path, PYTHONDONTWRITEBYTECODE='1')
    assert '2.0 MB  removed' in done.stdout and 'kept; RUNS=1 removes it' in done.stdout
    assert kept.exists() and run_.exists() and not cache.exists()
    done = run(sys.executable, 'tools/clean.py', '--yes', '--runs', cwd=tmp_path, PYTHONDONTWRITEBYTECODE='1')
    assert '2.0 MB  artifacts/runs/r\n' in done.stdout and 'kept' not in done.stdout
    assert kept.exists() and not run_.exists()


def test_clean_leaves_what_settings_put_outside(tmp_path):
    shutil.copytree(TOOLS, tmp_path / 'c' / 'tools', ignore=shutil.ignore_patterns('__pycache__'))
    shutil.copy2(ROOT / 'settings.ini', tmp_path / 'c')
    (tmp_path / 'mine').mkdir()
    done = run(sys.executable, tmp_path / 'c/tools/clean.py', '--yes', LADDERBOOK_PATHS_CACHE=str(tmp_path / 'mine'))
    assert done.returncode == 0
    assert (tmp_path / 'mine').exists()


def test_every_make_command_is_described():
    text = (ROOT / 'Makefile').read_text()
    commands = set(re.search(r'^\.PHONY: (.*)$', text, re.MULTILINE)[1].split()) - {
        'dev',
        'train',
        'serving-if-it-fits',
    }
    described = set(re.findall(r'^([\w-]+):.*## \w', text, re.MULTILINE))
    assert commands == described
    readme = (ROOT / 'README.md').read_text()
    assert set(re.findall(r'`make ([\w-]+)', readme)) <= commands
