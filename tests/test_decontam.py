"""Contracts of decontamination: pins, engines and processes that change nothing, real cases, leaks that are found."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies
from ladderbook.data import benchmarks, leaks
from ladderbook.data.benchmarks import BENCHMARKS, SEARCHED, Item
from ladderbook.data.decontam import LIMITS, RULES, Limits, identity, index, scan, tokens, words
from ladderbook.data.engine import Local
from ladderbook.data.shingles import buffer
from ladderbook.errors import IntegrityError, UsageError
from ladderbook.files import digest
from ladderbook.settings import load

CACHE = load().paths.cache / 'sources'


def table(rows):
    """Documents from (source, text)."""
    sources, texts = zip(*rows, strict=True)
    doc = [f'{s}/{i:04d}' for i, s in enumerate(sources)]
    return pa.table({'doc': doc, 'source': sources, 'text': pa.array(texts, pa.large_string())})


def decided(texts, items, **limits):
    """What each rule decides about each of `texts`, all of one source: {rule: [bool]}."""
    found = scan(table([('here', t) for t in texts]), index(items), limits=Limits(**limits))
    return {r: found[r].to_pylist() for r in RULES}


def item(text, name='set/0', *more):
    return Item(name, (text, *(f'{text} {m}' for m in more)), text)


def numbered(n, start=0):
    return ' '.join(f'word{i}' for i in range(start, start + n))


@pytest.fixture(scope='module')
def exemplars(tmp_path_factory):
    return benchmarks.load(tmp_path_factory.mktemp('empty'), names=('gsm8k_exemplars', 'mmlu_exemplars'))


def fetched(*names):
    """The items of sets whose packages are in the cache already; otherwise the test is skipped."""
    for name in names:
        if not (CACHE / BENCHMARKS[name].pin.file).is_file():
            pytest.skip(f'{BENCHMARKS[name].pin.file} is not fetched')
    return benchmarks.load(CACHE, names=names)


# pins


def test_what_a_corpus_is_cleaned_of_is_known_without_a_file_and_changes_with_every_set():
    whole = identity()
    assert {n: whole['benchmarks'][n]['items'] for n in ('humaneval', 'logiqa')} == {'humaneval': 164, 'logiqa': 677}
    assert all(len(x['sha256']) == 64 and x['role'] in benchmarks.ROLES for x in whole['benchmarks'].values())
    others = [
        identity('any'),
        identity(limits=Limits(share=0.3)),
        {**whole, 'benchmarks': benchmarks.identity(SEARCHED[1:])},
    ]
    assert len({digest(x) for x in [whole, *others]}) == 4
    assert json.loads(json.dumps(whole)) == whole


def test_roles_say_what_a_set_is_for():
    assert {BENCHMARKS[n].role for n in ('humaneval', 'gsm8k', 'hellaswag', 'truthfulqa_mc1')} == {'planned test'}
    assert {BENCHMARKS[n].role for n in ('mmlu_exemplars', 'gsm8k_exemplars', 'logiqa')} == {'development'}


def test_a_reader_that_reads_something_else_is_refused(tmp_path, monkeypatch):
    before = BENCHMARKS['gsm8k_exemplars']
    monkeypatch.setitem(
        BENCHMARKS, 'gsm8k_exemplars', replace(before, read=lambda data: [{'text': 'a'} for _ in range(8)])
    )
    with pytest.raises(IntegrityError, match='its file or its reader changed'):
        benchmarks.benchmark('gsm8k_exemplars', tmp_path)
    monkeypatch.setitem(BENCHMARKS, 'gsm8k_exemplars', replace(before, member='lm_eval/none.yaml'))
    if (CACHE / before.pin.file).is_file():
        with pytest.raises(IntegrityError, match='has 0 items'):
            benchmarks.benchmark('gsm8k_exemplars', CACHE, CACHE)


def test_an_item_is_searched_for_as_question_and_with_every_answer(exemplars):
    first = exemplars[8]
    assert first.name == 'mmlu_exemplars/0' and len(first.texts) == 5 and first.leaked in first.texts[1:]
    assert all(t.startswith(first.texts[0]) and 'Q:' not in t and not t.endswith('A:') for t in first.texts)


# engines and processes


def sample(exemplars):
    rng, rows = np.random.default_rng(1), []
    for i in range(120):
        filler = ' '.join(f'w{x}' for x in rng.integers(0, 300, 200))
        x = exemplars[int(rng.integers(len(exemplars)))]
        rows.append((f's{i % 4}', filler + str(rng.choice([' ', '\n', '\n\n'])) + (x.leaked if i % 2 else '')))
    return table([*rows, ('s0', ''), ('s1', '—'), ('s2', 'one')])


@pytest.mark.parametrize('engine', [Local(rows=1), Local(rows=17), Local(workers=2, rows=40)], ids=str)
def test_engine_and_batch_size_change_nothing(exemplars, engine):
    documents, mine = sample(exemplars), index(exemplars)
    usual = scan(documents, mine)
    assert scan(documents, mine, engine=engine).equals(usual)
    assert 20 < sum(usual['ours'].to_pylist()) < 100


@pytest.mark.parametrize('hashes', ['0', '77'])
def test_another_process_with_another_hash_seed_says_the_same(exemplars, hashes, tmp_path):
    code = (
        'import test_decontam as t, pathlib\n'
        f'x = t.benchmarks.load(pathlib.Path({str(tmp_path)!r}), names=("gsm8k_exemplars", "mmlu_exemplars"))\n'
        'print(t.digest(t.scan(t.sample(x), t.index(x)).to_pydict()))'
    )
    environment = {**os.environ, 'PYTHONHASHSEED': hashes, 'OMP_NUM_THREADS': '1'}
    done = subprocess.run(
        [sys.executable, '-c', code],
        cwd=Path(__file__).parent,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == digest(scan(sample(exemplars), index(exemplars)).to_pydict())


# the two readings of the published rule, at their edges


def test_any_is_thirteen_words_and_not_twelve():
    text = item(numbered(40))
    found = decided([f'x {numbered(13, 7)} y', f'x {numbered(12, 7)} y', numbered(13, 7).upper()], [text])
    assert found['any'] == [True, False, True]


def test_paragraph_is_half_of_it_and_keeps_case_and_punctuation():
    text = item(numbered(33))  # 21 runs
    half = f'{numbered(33)} {numbered(21, 100)}'  # 42 runs, 21 of them known
    below = f'{numbered(33)} {numbered(22, 100)}'
    others = [numbered(33).replace('word16 ', 'word16, '), numbered(33).upper(), numbered(33).replace(' ', '\n')]
    assert decided([half, below, *others], [text])['paragraph'] == [True, False, False, False, True]
    torn = '\n\n'.join(numbered(8, i) for i in range(0, 32, 8))
    assert decided([torn], [text]) == {'any': [True], 'paragraph': [False], 'ours': [True]}


def test_a_run_without_a_letter_counts_for_no_paragraph():
    digits = ' '.join(str(i) for i in range(40))
    assert decided([digits], [item(digits)]) == {'any': [True], 'paragraph': [False], 'ours': [True]}


def test_a_short_paragraph_is_one_feature_of_its_own():
    text = item(f'return the list\n\n{numbered(40)}')
    found = decided(['a b c\n\nreturn the list', 'now return the list', 'the list'], [text])
    assert found['paragraph'] == [True, False, False] and found['ours'] == found['any'] == [False] * 3


# ours


def test_ours_is_a_share_of_the_item_wherever_it_stands():
    text = item(numbered(62))  # 50 runs
    filler = ' '.join(f'f{i}' for i in range(3000))
    texts = [f'{filler} {numbered(n)} {filler}' for n in (22, 21)]
    assert decided(texts, [text])['ours'] == [True, False]
    assert decided(texts, [text], share=0.18)['ours'] == [True, True]
    assert decided([t.replace(' ', '\n\n') for t in texts], [text])['ours'] == [True, False]


def test_an_item_of_five_words_is_found_word_for_word_and_one_of_four_is_not():
    texts = ['She asked: who wrote the first novel? Nobody knew.', 'who wrote the very first novel']
    assert decided(texts, [item('Who wrote the first novel?')])['ours'] == [True, False]
    assert decided(['who wrote the novel'], [item('Who wrote the novel?')])['ours'] == [False]


def test_a_template_of_the_benchmark_is_no_evidence_but_a_passage_of_a_few_items_is():
    head = numbered(30)
    many = [item(f'{head} {numbered(20, 1000 * i)}', f'set/{i}') for i in range(1, 13)]
    assert decided([head], many) == {'any': [True], 'paragraph': [True], 'ours': [False]}
    assert decided([head], many[:10])['ours'] == [True]
    assert decided([f'{head} {numbered(20, 3000)}'], many)['ours'] == [True]


def test_what_many_documents_or_three_sources_say_is_no_evidence():
    text, mine = item(numbered(40)), numbered(20)
    spoken = [mine] * (LIMITS.documents + 1)
    assert not any(decided(spoken, [text])['ours']) and all(decided(spoken[1:], [text])['ours'])
    for sources, found in ((('a', 'b', 'a'), True), (('a', 'b', 'c'), False)):
        attributes = scan(table([(s, mine) for s in sources]), index([text]))
        assert attributes['ours'].to_pylist() == [found] * 3 and attributes['any'].to_pylist() == [True] * 3


def test_the_rule_that_acts_is_the_one_that_was_asked_for():
    documents, mine = (
        table([('a', numbered(30)), ('b', numbered(13) + ' other words'), ('c', 'x')]),
        index([item(numbered(60))]),
    )
    for rule, gone in (('any', 2), ('ours', 1)):
        found = scan(documents, mine, rule)
        assert found['removed'].to_pylist() == ['contaminated'] * gone + [''] * (3 - gone)
        assert found['rule'].to_pylist() == [rule] * gone + [''] * (3 - gone)
    assert found['item'].to_pylist() == ['set/0', 'set/0', ''] and found['text'].to_pylist()[2] == -1
    assert found['overlap'].to_pylist() == [18 / 48, 1 / 48, 0]


@pytest.mark.parametrize('bad', [{'share': 0.0}, {'share': 1.5}, {'items': 0}, {'documents': -1}])
def test_limits_that_mean_nothing_are_refused(bad):
    with pytest.raises(UsageError):
        Limits(**bad)


def test_items_need_names_of_their_own():
    for items in ([], [item('a'), item('b')]):
        with pytest.raises(UsageError, match='expected each its own'):
            index(items)


@settings(max_examples=60, deadline=None)
@given(strategies.lists(strategies.text(strategies.sampled_from('aB1é \n—_,文'), max_size=30), min_size=1, max_size=5))
def test_words_between_white_space_are_those_of_split(texts):
    data, ends = buffer(pa.array(texts, pa.large_string()))
    begins, hashes, letter = tokens(data, ends)
    plain = [w for t in texts for w in t.split()]
    assert len(begins) == len(plain) and len(set(hashes.tolist())) == len(set(plain))
    assert dict(zip(plain, hashes.tolist(), strict=True)).keys() == set(plain)
    ascii_letter = [any(c.isascii() and c.isalpha() or ord(c) > 127 for c in w) for w in plain]
    assert letter.tolist() == ascii_letter


def test_words_end_where_they_are_said_to():
    text = "Naïve, isn't it?"
    w = words(pa.array([text], pa.large_string()))
    data = text.encode()
    cut = [data[a:b].decode() for a, b in zip(w.begins, w.stops, strict=True)]
    assert cut == ['Naïve', 'isn', 't', 'it'] and w.last.tolist() == [4]


# real cases


def test_true_cases_are_removed(exemplars):
    """A prompt of GSM8K in a task file, an MMLU exemplar in another set, wrapped anew."""
    trees, conflict = exemplars[0], exemplars[8 + 146]
    assert trees.leaked.startswith('There are 15 trees in the grove')
    wrapped = '  - question: ' + trees.leaked.replace(' ', '\n      ', 20)
    other = f'Answer with one letter.\n\n{conflict.leaked}\n\nB'
    assert decided([wrapped, other], exemplars)['ours'] == [True, True]


def test_false_cases_are_kept(exemplars):
    """Famous words, an idiom of Python, a table of numerals, bits, the line above every exemplar: `any` would remove them all."""
    commerce = 'the power to regulate commerce with foreign nations and among the several states'
    loops = 'for i in range(len(l)): for j in range(i + 1, len(l)): '
    numerals = "{'zero': 0, 'one': 1, 'two': 2, 'three': 3, 'four': 4, 'five': 5, 'six': 6, 'seven': 7}"
    bits = '0 0 1 0 0 1 1 1 1 0 0 0 0 1'
    head = 'The following are multiple choice questions (with answers) about high school computer science.'
    items = [
        item(f'{t} {numbered(80, 100 * i)}', f'false/{i}') for i, t in enumerate([commerce, loops, numerals, bits])
    ]
    items += [item(f'{head} {x.texts[0]}', f'headed/{i}') for i, x in enumerate(exemplars[8:30])]
    texts = [
        f'The Constitution gives Congress {commerce}, which does not speak of roads.',
        f'def trifid(l):\n    {loops}yield l[i], l[j]',
        f'NUMBERS = {numerals}\n',
        f'What is the matrix? {bits}',
        f'description: "{head}"\ntask: mmlu_computer_science',
    ]
    found = decided(texts, items)
    assert found['any'] == [True] * 5 and found['ours'] == [False] * 5


def test_the_derived_set_of_logiqa_and_the_idioms_of_sympy():
    """The sources themselves, where they are fetched: the derived set leaks, sympy does not."""
    from ladderbook.data import ingest
    from ladderbook.data.sources import SOURCES

    mine = index(fetched('logiqa', 'humaneval'))
    parts = []
    for name in ('evals-logiqa-plus', 'sympy-code'):
        path = CACHE / SOURCES[name].file
        if not path.is_file():
            pytest.skip(f'{path.name} is not fetched')
        parts.append(ingest.ingest(SOURCES[name], path)[0])
    found = scan(pa.concat_tables(parts), mine).to_pylist()
    flagged = {r: [x['doc'] for x in found if x[r]] for r in RULES}
    leaked = [d for d in flagged['ours'] if d.startswith('evals-logiqa-plus/')]
    assert flagged['ours'] == leaked and 120 <= len(leaked) <= 171
    assert {x['item'].split('/')[0] for x in found if x['ours']} == {'logiqa'}
    wrong = [d for d in flagged['any'] if d.startswith('sympy-code/')]
    assert [d.rsplit('/', 1)[1] for d in wrong] == ['crypto.py', 'pretty_symbology.py']


def test_human_eval_is_found_where_it_is_planted():
    items = fetched('humaneval')
    mine, host = index(items), 'def other():\n    return 1\n\n' * 50
    found = scan(leaks.injected(items, [host], 'embedded'), mine)
    assert all(found['ours'].to_pylist()) and found['overlap'].to_pylist().count(1.0) == 164
    others = [x for x, i in zip(found['item'].to_pylist(), items, strict=True) if x != i.name]
    assert others == ['humaneval/56']  # the same task with other brackets, of which all words are the same


# leaks


def test_recall_of_ours_does_not_depend_on_lines_or_filler(exemplars):
    hosts = [f'{numbered(500, 1000 * i)}\n{numbered(300)}' for i in range(5)]
    found = leaks.recall(exemplars, hosts, index(exemplars))
    for form in ('verbatim', 're-wrapped', 'double-spaced', 'embedded'):
        assert found[form]['ours'] == found['verbatim']['ours'] >= 0.99
    assert found['embedded']['paragraph'] < 0.1 and found['double-spaced']['paragraph'] < 0.1
    assert 0.5 < found['edited']['ours'] < 1
    clean = scan(table([('a', h) for h in hosts]), index(exemplars))
    assert leaks.flag_rate(clean) == dict.fromkeys(RULES, 0.0)


def test_the_report_shows_both_texts_and_every_decision(exemplars):
    documents = table([('a', f'{numbered(30)}\n\n{exemplars[0].leaked}\n\n{numbered(30)}'), ('b', numbered(40))])
    mine = index(exemplars)
    [row] = leaks.report(documents, scan(documents, mine), mine)
    assert row['doc'] == 'a/0000' and row['source'] == 'a' and row['item'] == 'gsm8k_exemplars/0'
    assert row['ours'] is row['any'] is True and row['paragraph'] is True and row['overlap'] == 1
    assert 'word29 ⟦There are 15 trees' in row['document'] and row['benchmark'].startswith('⟦There are 15 trees')
    assert row['words'] == len(exemplars[0].leaked.replace('-', ' ').replace('=', ' ').split())
    assert '| remove | remove | remove |' in leaks.table([row])


def test_an_unknown_rule_or_form_is_refused(exemplars):
    with pytest.raises(UsageError, match='did you mean ours'):
        scan(table([('a', 'b')]), index(exemplars), 'our')
    with pytest.raises(UsageError, match='form of injection'):
        leaks.injected(exemplars, ['a'], 'shouted')
