"""What must hold for every file of the bundle, one line per finding; exit 1 when there is any."""

import argparse
import ast
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
LAYERS = ('ground', 'recipe', 'data', 'parallel', 'model', 'train', 'science', 'serve', 'replay', 'track', 'cli')
ROOF = ('cli', 'console', 'corpora', 'serving')
LARGEST = 5_000_000
EXPORTED_LINES, FUNCTION_LINES = 400, 60
FORBIDDEN = {
    'a path of one machine': re.compile(r'(?<![\w.~-])/(root|home/\w+|work|Users/\w+)/'),
    'a registry host': re.compile(
        r'py(?:pi)\.org|python(?:hosted)\.org|(?:registry\.)npm(?:js)\.(?:org|com)|deb(?:ian)\.org'
    ),
}


def git_files(root):
    "Tracked and new files of the clone; of an unpacked archive, every file."
    done = subprocess.run(
        ['git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard'],
        cwd=root,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return sorted(p for p in root.rglob('*') if p.is_file() and '.venv' not in p.parts)
    return sorted(p for name in done.stdout.split('\0') if name and (p := root / name).is_file())


def notebooks(root):
    "Every notebook of the book and of the retrospectives."
    found = (p for folder in ('nbs', 'retros') for p in (root / folder).rglob('*.ipynb'))
    return sorted(p for p in found if not any(x.startswith(('.', '_')) for x in p.relative_to(root).parts))


def cells(path, kind='code'):
    "The cells of a notebook of one kind, as (id, text)."
    book = json.loads(path.read_text(encoding='utf-8'))
    return [(c.get('id'), ''.join(c['source'])) for c in book['cells'] if c['cell_type'] == kind]


def style(root):
    "ruff, check and format, over the package, tests, tools and notebooks."
    for args in (['check', '--output-format=concise'], ['format', '--check', '--output-format=concise']):
        done = subprocess.run([BIN / 'ruff', *args, '--quiet', '.'], cwd=root, capture_output=True, text=True)
        yield from (line for line in (done.stdout + done.stderr).splitlines() if line.strip())


def compiled(root):
    "The package equals what the notebooks export, and the notebooks are clean: made again in a copy, compared."
    with tempfile.TemporaryDirectory() as d:
        copy = Path(d)
        for name in ('nbs', 'retros', 'package', 'tools'):
            if (root / name).is_dir():
                shutil.copytree(root / name, copy / name, ignore=shutil.ignore_patterns('__pycache__', '*.egg-info'))
        shutil.copy2(root / 'pyproject.toml', copy)
        for tool in (
            ['nbdev-clean'],
            ['nbdev-clean', '--fname', 'retros'],
            ['nbdev-export'],
        ):
            done = subprocess.run([BIN / tool[0], *tool[1:]], cwd=copy, capture_output=True, text=True)
            if done.returncode:
                yield f'{" ".join(tool)}: failed: {done.stderr.strip().splitlines()[-1]}'
        for folder in ('nbs', 'retros'):
            for name in differing(root / folder, copy / folder, '*.ipynb'):
                yield f'{folder}/{name}: not clean; mend: make fold NB=…'
        for name in differing(root / 'package', copy / 'package', '*.py'):
            yield f'package/{name}: not in step with its notebook; mend: make export'


def differing(ours, made, pattern):
    "Names under two folders whose bytes differ, or that only one of them has."
    names = {
        str(p.relative_to(top)) for top in (ours, made) for p in top.rglob(pattern) if '__pycache__' not in p.parts
    }

    def text(p):
        return p.read_bytes() if p.is_file() else None

    return sorted(n for n in names if text(ours / n) != text(made / n))


def readme(root):
    "README.md is made from nbs/index.ipynb."
    from readme import render

    if (root / 'README.md').read_text(encoding='utf-8') != render(root / 'nbs' / 'index.ipynb'):
        yield 'README.md: not in step with nbs/index.ipynb; mend: make export'


def books(root):
    "Per notebook: ids unique, a title and a summary, at most 400 exported lines."
    for path in notebooks(root):
        name = path.relative_to(root)
        ids = [i for kind in ('code', 'markdown', 'raw') for i, _ in cells(path, kind)]
        for twice in sorted({str(i) for i in ids if ids.count(i) > 1}):
            yield f'{name}: cell id {twice} is used twice'
        first = (cells(path, 'markdown') or [('', '')])[0][1]
        if not re.match(r'# .+\n+> .+', first):
            yield f'{name}: does not open with a title and a > summary'
        lines = sum(len(t.splitlines()) for _, t in cells(path) if t.startswith('#| export'))
        if lines > EXPORTED_LINES:
            yield f'{name}: exports {lines} lines; at most {EXPORTED_LINES}'


def links(root):
    "Relative links of the chapters and of the Markdown files at the top lead to files that exist."
    texts = [(p, p.read_text(encoding='utf-8')) for p in sorted(root.glob('*.md'))]
    texts += [(p, '\n'.join(t for _, t in cells(p, 'markdown'))) for p in notebooks(root)]
    for path, text in texts:
        for target in re.findall(r'\]\(([^)#\s]+)[^)]*\)', re.sub(r'`[^`]*`', '', text)):
            if not re.match(r'\w+:', target) and not (path.parent / target).exists():
                yield f'{path.relative_to(root)}: links to {target}, which does not exist'


def folder_of(module):
    "The layer a module belongs to: its folder, the roof (`cli`), or the ground."
    parts = module.split('.')
    if len(parts) > 1 and parts[1] in ROOF:
        return 'cli'
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS else 'ground'


def structure(root):
    "Per module: imports only from layers above, functions at most 60 lines, public ones with a docstring."
    package = root / 'package'
    for path in sorted(package.rglob('*.py')):
        name, tree = path.relative_to(root), ast.parse(path.read_text(encoding='utf-8'))
        module = '.'.join(path.relative_to(package).with_suffix('').parts)
        own = LAYERS.index(folder_of(module))
        for node in ast.walk(tree):
            for imported in imports(node, module):
                if LAYERS.index(folder_of(imported)) > own:
                    yield f'{name}:{node.lineno}: imports {imported}, which lies above it in the house'
            if isinstance(node, ast.FunctionDef) and (n := node.end_lineno - node.lineno + 1) > FUNCTION_LINES:
                yield f'{name}:{node.lineno}: {node.name} has {n} lines; at most {FUNCTION_LINES}'
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith('_'):
                if not ast.get_docstring(node):
                    yield f'{name}:{node.lineno}: {node.name} has no docstring'


def imports(node, module):
    "The ladderbook modules that an import statement names."
    if isinstance(node, ast.Import):
        return [a.name for a in node.names if a.name.startswith('ladderbook')]
    if isinstance(node, ast.ImportFrom):
        base = module.split('.')[: -node.level] if node.level else []
        full = '.'.join([*base, node.module] if node.module else base)
        return [f'{full}.{a.name}' for a in node.names] if full.startswith('ladderbook') else []
    return []


def unused(root):
    "Names of the package that neither the package, a notebook, a test nor a tool uses (vulture; `__all__` is no use)."
    with tempfile.TemporaryDirectory() as d:
        copy = Path(d)
        for path in (root / 'package').rglob('*.py'):
            if path.name != '_modidx.py':
                target = copy / path.relative_to(root)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(without_all(path.read_text(encoding='utf-8')), encoding='utf-8')
        for i, path in enumerate(notebooks(root)):
            text = '\n'.join(re.sub(r'^[%!].*$', 'pass', t, flags=re.MULTILINE) for _, t in cells(path))
            (copy / f'book_{i}.py').write_text(text, encoding='utf-8')
        places = [root / name for name in ('tests', 'tools', 'setup.py') if (root / name).exists()]
        done = subprocess.run([BIN / 'vulture', '.', *places], cwd=copy, capture_output=True, text=True)
    yield from (
        x
        for x in done.stdout.splitlines()
        if x.startswith('package/') and not re.search('unused (variable|attribute)', x)
    )


def without_all(text):
    "A module's text with its `__all__` blanked, line numbers kept."
    lines = text.splitlines()
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], 'id', None) == '__all__':
            lines[node.lineno - 1 : node.end_lineno] = [''] * (node.end_lineno - node.lineno + 1)
    return '\n'.join(lines) + '\n'


def words(root):
    "No tracked file names a machine's path or a registry host, and none is over 5 MB."
    for path in git_files(root):
        name = path.relative_to(root)
        if (size := path.stat().st_size) > LARGEST:
            yield f'{name}: {size} bytes; at most {LARGEST}'
            continue
        try:
            text = path.read_text(encoding='utf-8')
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            for what, pattern in FORBIDDEN.items():
                if found := pattern.search(line):
                    yield f'{name}:{number}: names {what}: {found.group()}'


CHECKS = {f.__name__: f for f in (style, compiled, readme, books, links, structure, unused, words)}


def main():
    "Run the checks named, or all; print the findings and how many."
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('checks', nargs='*', choices=[*CHECKS, []], help='default: all')
    p.add_argument('--root', type=Path, default=ROOT, help='another tree to look at')
    a = p.parse_args()
    names = a.checks or list(CHECKS)
    findings = [line for name in names for line in CHECKS[name](a.root.resolve())]
    print('\n'.join(findings) or f'lint: {", ".join(names)}: nothing to say')
    sys.exit(bool(findings))


if __name__ == '__main__':
    main()
