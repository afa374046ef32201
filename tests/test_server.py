"""The server as a person meets it: one real start of stock vLLM, asked, refused, stopped; and one killed half way."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import numpy as np
import psutil
import pytest
from ladderbook import settings
from ladderbook.data.tokens import load_tokenizer, open_corpus
from ladderbook.errors import NumericsError, ResourceError
from ladderbook.files import write_json
from ladderbook.recipe.spec import ModelSpec
from ladderbook.science import routes
from ladderbook.serve import export, golden, server
from ladderbook.serve.trace import prompts

SPEC = ModelSpec(
    layers=2, width=64, heads=2, head_dim=32, kv_heads_local=1, kv_heads_global=1, experts=8, top_k=2, expert_width=32,
    latent_width=32, shared_experts=1, shared_width=32, vocab=512, sequence=64, window=16, norm_rank=8,
)  # fmt: skip
KEY = 'a-long-secret'
STARTS = """
import sys
from pathlib import Path
from ladderbook.serve import server

def say(line):
    print(line, flush=True)

with server.start(Path(sys.argv[1]), port=int(sys.argv[2]), say=say) as running:
    for line in [str(running.process.pid), running.url, str(running.log), *running.lines()]:
        say(line)
    sys.exit(running.wait())
"""


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    run = export.example(tmp_path_factory.mktemp('server'), SPEC)
    return export.export(run, cache=run.parent.parent / 'cache').folder


def starter(folder, port, **environment):
    "A process that serves `folder` until it is stopped, as the command does."
    command = [sys.executable, '-c', STARTS, str(folder), str(port)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | environment)


def family(pid):
    one = psutil.Process(pid)
    return [one, *one.children(recursive=True)]


def gone(processes, seconds=30):
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope='module')
def running(folder):
    "Lines of a server that runs, its process and the one that started it."
    process = starter(folder, 0, **{server.KEY: KEY})
    lines = [process.stdout.readline().strip() for _ in range(7)]
    try:
        assert process.poll() is None and len(lines[-1]) > 5, lines
        yield process, lines[1:]
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
        process.stdout.close()


def ask(url, body=None, key=KEY, headers=None):
    "Status and content of an answer."
    headers = headers or {'content-type': 'application/json'} | ({'authorization': f'Bearer {key}'} if key else {})
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode()


def test_the_line_that_it_prints_gets_an_answer(running):
    line = next(x for x in running[1] if x.startswith('curl '))
    assert KEY not in line
    words = subprocess.run(  # what a shell makes of the line, whether or not curl is here
        ['sh', '-c', line.replace('curl', r'printf "%s\n"', 1)], capture_output=True, text=True,
        env={'LADDERBOOK_API_KEY': KEY, 'PATH': os.environ['PATH']},
    ).stdout.splitlines()  # fmt: skip
    assert words[0] == '-s' and [words[i] for i in (2, 4, 6)] == ['-H', '-H', '-d'] and len(words) == 8
    headers = dict(words[i].split(': ', 1) for i in (3, 5))
    status, content = ask(words[1], words[7].encode(), headers=headers)
    assert status == 200
    assert json.loads(content)['usage']['completion_tokens'] == json.loads(words[7])['max_tokens']


def test_without_the_key_only_health_answers(running):
    url, named = running[1][1], ' '.join(running[1])
    assert f'{url}/health' in named and f'{url}/metrics' in named
    model = json.loads(ask(f'{url}/v1/models')[1])['data'][0]['id']
    body = {'model': model, 'prompt': 'The', 'max_tokens': 1}
    for path in ('/v1/completions', '/invocations'):
        assert [ask(url + path, body, key)[0] for key in ('', KEY[:-1], KEY)] == [401, 401, 200], path
    for path in ('/v1/models', '/metrics', '/openapi.json'):
        assert [ask(url + path, None, key)[0] for key in ('', KEY[:-1], KEY)] == [401, 401, 200], path
    assert ask(f'{url}/health', None, '')[0] == 200


def test_a_whole_context_is_taken_and_no_more(running):
    url = running[1][1]
    model = json.loads(ask(f'{url}/v1/models')[1])['data'][0]['id']
    body = {'model': model, 'max_tokens': 1, 'prompt_logprobs': 0}
    status, content = ask(f'{url}/v1/completions', body | {'prompt': [5] * SPEC.sequence})
    assert status == 200 and len(json.loads(content)['choices'][0]['prompt_logprobs']) == SPEC.sequence
    status, content = ask(f'{url}/v1/completions', body | {'prompt': [5] * (SPEC.sequence + 1)})
    assert status == 400 and json.loads(content)['error']['type'] == 'BadRequestError'


def test_chat_is_refused_in_one_sentence(running):
    url = running[1][1]
    model = json.loads(ask(f'{url}/v1/models')[1])['data'][0]['id']
    asked = {'model': model, 'messages': [{'role': 'user', 'content': 'hello'}]}
    status, content = ask(f'{url}/v1/chat/completions', asked)
    assert (status, json.loads(content)['error']['message']) == (400, server.NO_CHAT)


def test_the_harness_gets_what_jax_says(running, folder):
    """Both routes of the evaluation, item by item, through the server that users meet."""
    tokenizer = load_tokenizer(folder / 'tokenizer.json')
    served = routes.EndpointLM(running[1][1], tokenizer, SPEC.sequence, key=KEY)
    ours = routes.JaxLM(export.state(folder), tokenizer)
    draw = np.random.default_rng(2)
    pairs = [
        (draw.integers(1, 512, n).tolist(), draw.integers(1, 512, m).tolist()) for n, m in ((5, 3), (40, 20), (1, 1))
    ]
    for (a, greedy_a), (b, greedy_b) in zip(served.score(pairs), ours.score(pairs), strict=True):
        assert abs(a - b) < 1e-4 and greedy_a == greedy_b


def test_the_golden_answers_come(running, folder):
    model = export.state(folder)
    heldout = open_corpus(folder.parent.parent.parent / 'cache' / 'corpora' / 'tiny').heldout
    value = golden.write(folder, model, prompts(heldout, SPEC, 8), settings.load().home, 'a test')
    url = running[1][1]
    name = json.loads(ask(f'{url}/v1/models')[1])['data'][0]['id']
    assert golden.ask(folder, url, name, 'float32', KEY) == 2
    wrong = value['cases'][1] | {'next': value['cases'][1]['next'][::-1]}
    write_json(folder / 'golden.json', value | {'cases': [value['cases'][0], wrong]}, golden.SCHEMA)
    with pytest.raises(NumericsError, match='golden case 2: new token'):
        golden.ask(folder, url, name, 'float32', KEY)
    (folder / 'golden.json').unlink()


def test_its_port_is_in_use(running, folder):
    port = int(running[1][1].rsplit(':', 1)[1])
    with pytest.raises(ResourceError, match=f'port {port} of 127.0.0.1 is in use') as e:
        server.start(folder, port=port)
    assert e.value.exit_code == 5


def test_stopped_it_leaves_nothing(running):
    process, lines = running
    processes = family(int(lines[0]))
    assert len(processes) >= 3  # front end, engine, worker
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert gone(processes)
    assert not os.path.exists(lines[2])


def test_killed_half_way_it_leaves_nothing(folder):
    process = starter(folder, 0)
    assert 'starting vLLM' in process.stdout.readline()
    until = time.monotonic() + 120
    while len(processes := family(process.pid)) < 3 and time.monotonic() < until:
        assert process.poll() is None
        time.sleep(0.1)
    assert len(processes) >= 3  # this one, the front end and the engine, which loads
    process.kill()
    process.wait()
    process.stdout.close()
    assert gone(processes[1:])


def test_there_is_no_environment(folder, monkeypatch, tmp_path):
    monkeypatch.setenv('LADDERBOOK_ENVIRONMENTS_SERVE', str(tmp_path))
    with pytest.raises(ResourceError, match='make serve-env') as e:
        server.start(folder, port=0)
    assert e.value.exit_code == 5
    assert settings.load().environments.serve == tmp_path
