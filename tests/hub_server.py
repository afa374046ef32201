"""A small hub on this machine: the endpoints that the real client calls, with faults that can be switched on."""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = 'hf_thisIsTheSecretOfTheTest'
REGULAR = 2_000  # larger files, and all weights, are stored as large files


def blob(data):
    "Git's name for a file's content."
    return hashlib.sha1(b'blob %d\0' % len(data) + data, usedforsecurity=False).hexdigest()


class Hub:
    """The state of the server: `repos` name to branches, branches to commits, commits to files.

    `fault(method, path)` may return a status to answer with instead, or None; `tamper(path, data)` changes what a
    download gives; `lose` names a file that commits drop; `seen` is every request."""

    def __init__(self):
        self.repos, self.large, self.seen, self.lock = {}, {}, [], threading.Lock()
        self.fault = lambda method, path: None
        self.tamper = lambda path, data: data
        self.store = lambda oid, data: data
        self.count = 0

    def commit(self, repo, branch, files):
        "A new commit of `files` (path to bytes) on a branch; returns its name."
        self.count += 1
        oid = hashlib.sha1(f'{repo} {branch} {self.count}'.encode()).hexdigest()
        r = self.repos[repo]
        r['commits'][oid] = dict(files)
        r['branches'][branch] = oid
        return oid

    def create(self, repo):
        self.repos[repo] = {'branches': {}, 'commits': {}}
        self.commit(repo, 'main', {'.gitattributes': b'*.safetensors filter=lfs\n'})

    def files(self, repo, revision='main'):
        r = self.repos[repo]
        return r['commits'][r['branches'].get(revision, revision)]


def is_large(path, size):
    return path.endswith('.safetensors') or size > REGULAR


class Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    hub = None

    def log_message(self, *args):
        pass

    def answer(self, status, value=None, headers=None, body=None):
        body = json.dumps(value if value is not None else {}).encode() if body is None else body
        self.send_response(status)
        for k, v in {'Content-Length': str(len(body)), 'Content-Type': 'application/json', **(headers or {})}.items():
            self.send_header(k, v)
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(body)

    def body(self):
        size = self.headers.get('Content-Length')
        if size is not None:
            return self.rfile.read(int(size))
        data = b''
        while n := int(self.rfile.readline().strip() or b'0', 16):  # chunked
            data += self.rfile.read(n)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def handle_any(self):
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        data = self.body() if self.command in ('POST', 'PUT') else b''
        with hub.lock:
            hub.seen.append((self.command, path))
            status = hub.fault(self.command, path)
        if status == 'cut':
            self.close_connection = True
            return self.connection.shutdown(2)
        if status:
            return self.answer(status, {'error': 'a planned fault'}, {'X-Error-Message': 'a planned fault'})
        open_to_all = path.startswith('/lfs/') or (self.command in ('GET', 'HEAD'))
        if not open_to_all and self.headers.get('Authorization') != f'Bearer {TOKEN}':
            return self.answer(401, {'error': 'Invalid credentials'})
        for method, pattern, act in ROUTES:
            if method == self.command and (m := re.fullmatch(pattern, path)):
                with hub.lock:
                    return act(self, data, *m.groups())
        return self.answer(404, {'error': 'not found'}, {'X-Error-Code': 'EntryNotFound'})

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    # --- what a client asks --------------------------------------------------------------------------------------------

    def create_repo(self, data):
        asked = json.loads(data)
        name = f'{asked["organization"]}/{asked["name"]}'
        if name in self.hub.repos:
            return self.answer(409, {'error': 'You already created this model repo', 'url': name})
        self.hub.create(name)
        self.answer(200, {'url': f'{self.hub.url}/{name}', 'name': name, 'id': name})

    def create_branch(self, data, repo, branch):
        r = self.hub.repos[repo]
        if branch in r['branches']:
            return self.answer(409, {'error': 'Reference already exists'})
        r['branches'][branch] = r['branches']['main']
        self.answer(200)

    def refs(self, data, repo):
        branches = [{'name': b, 'ref': f'refs/heads/{b}', 'targetCommit': c} for b, c in self.branches(repo)]
        self.answer(200, {'branches': branches, 'converts': [], 'tags': [], 'pullRequests': []})

    def branches(self, repo):
        return sorted(self.hub.repos[repo]['branches'].items())

    def validate_yaml(self, data):
        self.answer(200, {'errors': [], 'warnings': []})

    def preupload(self, data, repo, revision):
        there, files = self.hub.files(repo, revision), []
        for f in json.loads(data)['files']:
            large, content = is_large(f['path'], f['size']), there.get(f['path'])
            name = None if content is None else hashlib.sha256(content).hexdigest() if large else blob(content)
            mode = 'lfs' if large else 'regular'
            files.append({'path': f['path'], 'uploadMode': mode, 'shouldIgnore': False, 'oid': name})
        self.answer(200, {'files': files})

    def batch(self, data, repo):
        objects = []
        for o in json.loads(data)['objects']:
            upload = {'upload': {'href': f'{self.hub.url}/lfs/{o["oid"]}'}}
            objects.append({**o, **({} if o['oid'] in self.hub.large else {'actions': upload})})
        self.answer(200, {'transfer': 'basic', 'objects': objects})

    def put(self, data, oid):
        self.hub.large[oid] = self.hub.store(oid, data)
        self.answer(200)

    def commit(self, data, repo, revision):
        files = dict(self.hub.files(repo, revision))
        for line in map(json.loads, data.splitlines()):
            value = line['value']
            if line['key'] == 'file':
                files[value['path']] = base64.b64decode(value['content'])
            elif line['key'] == 'lfsFile':
                files[value['path']] = self.hub.large[value['oid']]
            elif line['key'] == 'deletedFile':
                del files[value['path']]
        oid = self.hub.commit(repo, revision, files)
        self.answer(200, {'commitUrl': f'{self.hub.url}/{repo}/commit/{oid}', 'commitOid': oid})

    def info(self, data, repo, revision='main'):
        r = self.hub.repos.get(repo)
        if r is None:
            return self.answer(404, {'error': 'Repository not found'}, {'X-Error-Code': 'RepoNotFound'})
        oid = r['branches'].get(revision, revision)
        if oid not in r['commits']:
            return self.answer(404, {'error': 'Invalid rev id'}, {'X-Error-Code': 'RevisionNotFound'})
        self.answer(200, {'id': repo, 'modelId': repo, 'sha': oid, 'private': False, 'tags': [], 'siblings': []})

    def tree(self, data, repo, revision):
        found = []
        for path, content in sorted(self.hub.files(repo, revision).items()):
            entry = {'type': 'file', 'path': path, 'size': len(content), 'oid': blob(content)}
            if is_large(path, len(content)):
                large = {'oid': hashlib.sha256(content).hexdigest(), 'size': len(content), 'pointerSize': 130}
                entry['lfs'] = large
            found.append(entry)
        self.answer(200, found)

    def resolve(self, data, repo, revision, path):
        content = self.hub.files(repo, revision).get(path)
        if content is None:
            return self.answer(404, {'error': 'not found'}, {'X-Error-Code': 'EntryNotFound'})
        r = self.hub.repos[repo]
        name = hashlib.sha256(content).hexdigest() if is_large(path, len(content)) else blob(content)
        headers = {'ETag': f'"{name}"', 'X-Repo-Commit': r['branches'].get(revision, revision)}
        self.answer(200, headers=headers | {'Accept-Ranges': 'none'}, body=self.hub.tamper(path, content))


REPO = r'([\w.-]+/[\w.-]+)'
ROUTES = [
    ('POST', '/api/repos/create', Handler.create_repo),
    ('POST', '/api/validate-yaml', Handler.validate_yaml),
    ('POST', f'/api/models/{REPO}/branch/(.+)', Handler.create_branch),
    ('POST', f'/api/models/{REPO}/preupload/(.+)', Handler.preupload),
    ('POST', f'/api/models/{REPO}/commit/(.+)', Handler.commit),
    ('POST', rf'/{REPO}\.git/info/lfs/objects/batch', Handler.batch),
    ('PUT', '/lfs/([0-9a-f]+)', Handler.put),
    ('GET', f'/api/models/{REPO}/refs', Handler.refs),
    ('GET', f'/api/models/{REPO}/tree/(.+)', Handler.tree),
    ('GET', f'/api/models/{REPO}/revision/(.+)', Handler.info),
    ('GET', f'/api/models/{REPO}', Handler.info),
    ('HEAD', f'/{REPO}/resolve/([^/]+)/(.+)', Handler.resolve),
    ('GET', f'/{REPO}/resolve/([^/]+)/(.+)', Handler.resolve),
]


@contextmanager
def serve():
    "A hub on a free port of this machine, as long as the block runs."
    hub = Hub()
    server = ThreadingHTTPServer(('127.0.0.1', 0), type('Bound', (Handler,), {'hub': hub}))
    server.daemon_threads = True
    hub.url = f'http://127.0.0.1:{server.server_port}'
    thread = threading.Thread(target=server.serve_forever, kwargs={'poll_interval': 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
