"""README.md from nbs/index.ipynb: prose as it stands, code with its kept output, `#| hide` cells left out."""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIRECTIVE = re.compile(r'^#\|.*\n?', re.MULTILINE)


def output(cell):
    "The text that a code cell leaves, fenced."
    parts = []
    for out in cell.get('outputs', []):
        text = out.get('text') or out.get('data', {}).get('text/plain', '')
        parts.append(''.join(text).rstrip())
    text = '\n'.join(parts)
    return f'\n\n```text\n{text}\n```' if any(parts) else ''


def render(notebook):
    "The notebook as Markdown; its links, relative to nbs/, become relative to the root."
    blocks = []
    for cell in json.loads(notebook.read_text(encoding='utf-8'))['cells']:
        text = ''.join(cell['source'])
        if '#| hide' in text:
            continue
        if cell['cell_type'] == 'code':
            text = f'```python\n{DIRECTIVE.sub("", text).strip()}\n```{output(cell)}'
        else:
            text = re.sub(r'\]\((?!https?:|#|\.\./)([^)]+)\)', r'](nbs/\1)', text).replace('](../', '](')
        blocks.append(text.strip())
    return '\n\n'.join(blocks) + '\n'


def main():
    "Write README.md."
    (ROOT / 'README.md').write_text(render(ROOT / 'nbs' / 'index.ipynb'), encoding='utf-8')
    return 0


if __name__ == '__main__':
    sys.exit(main())
