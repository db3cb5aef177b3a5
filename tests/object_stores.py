"""Emulators of Google Cloud Storage and S3 on free ports of 127.0.0.1, with faults; see the fixtures in conftest.py."""

import contextlib
import email.message
import http.client
import http.server
import io
import itertools
import logging
import os
import re
import threading
import time
import urllib.parse

import fsspec
import gcp_storage_emulator.server
from gcp_storage_emulator.handlers import buckets
from gcp_storage_emulator.server import RequestHandler, Router
from gcp_storage_emulator.storage import Storage

FAULTS = ("error", "lost", "stall", "cut", "lag")
_STALL = 0.5  # seconds
_PAGE = 1000  # entries of a listing that the real store returns per request
_CHUNKED = "transfer-encoding"
_NUMBERS = itertools.count()


class GoogleStorage:
    """Emulator of Google Cloud Storage that honors generations and can misbehave.

    Attributes:
      requests: method and path of each request; a listing counts once for each page of the real store.
      sent: path and size of the answer to each GET.
      choose_fault: function of method and path that returns one of these, or None; called for each request.
        'error': 503, nothing was done. 'lost': done, but the answer is 503. 'stall': no answer for some seconds, then a
        closed connection. 'cut': the answer ends in the middle. 'lag': a listing as it was at the last request for it.
        'html': 500 with a page, nothing was done. 'flip': one bit of the answer is another.
      delay: seconds before each answer.
    """

    def __init__(self):
        self.requests = []
        self.sent = []
        self.choose_fault = lambda method, path: None
        self.delay = 0.0
        self.storage = _Storage()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), lambda *args: _Handler(self, *args))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.lock = threading.Lock()  # the emulator is not thread-safe
        self.listings = {}
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def environment(self):
        """The variables that direct gcsfs and TensorStore to the emulator."""
        return dict(
            STORAGE_EMULATOR_HOST=self.url,
            TENSORSTORE_GCS_HTTP_URL=self.url,
            NO_GCE_CHECK="true",
            GCE_METADATA_ROOT="127.0.0.1:1",  # nobody is there to ask for credentials
            GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT="false",  # or it asks Google what kind of bucket each is
            FSSPEC_GCS_TOKEN="anon",
            FSSPEC_GS_TOKEN="anon",
        )

    def make_bucket(self):
        """Return the URL of a new bucket."""
        name = f"bucket-{next(_NUMBERS)}"
        with self.lock:
            buckets.create_bucket(name, self.storage)
            self.storage.buckets[name]["softDeletePolicy"] = {"retentionDurationSeconds": 0}
        return f"gs://{name}"

    def list_names(self, url):
        """Return the names of all objects below a URL, without a request."""
        bucket, _, prefix = f"{url}/".removeprefix("gs://").partition("/")
        with self.lock:
            names = sorted(self.storage.objects.get(bucket, {}))
        return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]

    def copy(self, source, target):
        """Copy all objects below a URL to another one of the same bucket, without a request."""
        bucket, _, prefix = source.removeprefix("gs://").partition("/")
        new = target.removeprefix(f"gs://{bucket}/")
        for name in self.list_names(source):
            with self.lock:
                content = self.storage.get_file(bucket, f"{prefix}/{name}")
                entry = {**self.storage.get_file_obj(bucket, f"{prefix}/{name}"), "name": f"{new}/{name}"}
                self.storage.generation = None
                self.storage.create_file(bucket, f"{new}/{name}", content, entry)

    def close(self):
        self._server.shutdown()
        self._server.server_close()


_read_data = gcp_storage_emulator.server._read_data


def _read_upload(handler, query):
    """Return the data of a request, with the bytes of an upload as they are: the emulator drops a last b"\\r"."""
    body = handler.rfile.read()
    handler.rfile = io.BytesIO(body)
    data = _read_data(handler, query)
    if isinstance(data, dict) and "content" in data:
        header = email.message.Message()
        header["Content-Type"] = handler.headers["Content-Type"]
        eol = b"\r\n" if body.partition(b"\n")[0].endswith(b"\r") else b"\n"
        boundary = eol + f"--{header.get_param('boundary')}".encode()
        part = body.partition(boundary)[2].rpartition(boundary)[0]  # after the metadata
        data["content"] = part.partition(2 * eol)[2]
    return data


gcp_storage_emulator.server._read_data = _read_upload


class _PreconditionError(Exception):
    """The object has another generation."""


class _Storage(Storage):
    def __init__(self):
        super().__init__(use_memory_fs=True)
        self.generation = None  # what the request expects: '0' for an object that does not exist

    def _write_config_to_file(self):
        pass  # the emulator would write a list of all objects at each request

    def create_file(self, bucket_name, file_name, *args, **kwargs):
        self._check(bucket_name, file_name)
        super().create_file(bucket_name, file_name, *args, **kwargs)

    def delete_file(self, bucket_name, file_name):
        self._check(bucket_name, file_name)
        super().delete_file(bucket_name, file_name)

    def _check(self, bucket_name, file_name):
        current = self.objects.get(bucket_name, {}).get(file_name, {}).get("generation", "0")
        if self.generation not in (None, current):
            raise _PreconditionError


class _Handler(RequestHandler):
    def __init__(self, store, *args):
        self._store = store
        super().__init__(store.storage, *args)

    def do_GET(self):
        self._serve("GET")

    def do_POST(self):
        self._serve("POST")

    def do_PUT(self):
        self._serve("PUT")

    def do_PATCH(self):
        self._serve("PATCH")

    def do_DELETE(self):
        self._serve("DELETE")

    def _serve(self, method):
        path = urllib.parse.unquote(self.path)
        fault = self._store.choose_fault(method, path)
        if fault in ("lost", "cut") and "upload_id=" in path:
            fault = (
                "error"  # the real store answers again for an upload that is complete; the emulator has forgotten it
            )
        time.sleep(self._store.delay)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if fault == "stall":
            time.sleep(_STALL)
            return
        if fault in ("error", "html"):
            self._answer_unavailable(500 if fault == "html" else 503)
            self._store.requests.append((method, path))
            return
        self.rfile = io.BytesIO(body)
        sent = self._run(method)
        if method == "GET":
            self._store.sent.append((path, len(sent)))
        is_listing = method == "GET" and re.search(r"/b/[^/]+/o(\?|$)", path)
        pages = max(1, -(-sent.count(b'"name"') // _PAGE)) if is_listing else 1
        self._store.requests += [(method, path)] * pages
        if is_listing:
            earlier, self._store.listings[path] = self._store.listings.get(path, sent), sent
            sent = earlier if fault == "lag" else sent
        if fault == "lost":
            self._answer_unavailable()
            return
        with contextlib.suppress(ConnectionError):  # of a client that was killed
            self.wfile.write(damage(sent, fault))

    def _run(self, method):
        """Return the answer as it goes over the wire."""
        connection, self.wfile = self.wfile, io.BytesIO()
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
        try:
            with self._store.lock:
                self.storage.generation = query.get("ifGenerationMatch", [None])[0]
                Router(self).handle(method)
        except _PreconditionError:
            self.wfile = io.BytesIO()
            self._headers_buffer = []
            self.send_response(412)
            self.send_header("Content-Length", "0")
            self.end_headers()
        finally:
            answer, self.wfile = self.wfile.getvalue(), connection
        return answer

    def _answer_unavailable(self, status=503):
        page = b"<html><body><h1>Server Error</h1></body></html>" if status == 500 else b""
        self.send_response(status)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def end_headers(self):
        """Add the generation to an object's bytes, with which TensorStore replaces only what it has read."""
        if match := re.search(r"/b/([^/]+)/o/([^?]+)\?(?:.*&)?alt=media", self.path):
            bucket, name = map(urllib.parse.unquote, match.groups())
            generation = self.storage.objects.get(bucket, {}).get(name, {}).get("generation", "0")
            self.send_header("x-goog-generation", generation)
        super().end_headers()

    def log_message(self, format, *args):
        pass


def damage(answer, fault):
    """Return the bytes of an answer to send for 'cut' and 'flip'; all of them for another fault."""
    if fault == "cut":
        return answer[: len(answer) // 2 + 1]
    start = answer.index(b"\r\n\r\n") + 4
    if fault == "flip" and start < len(answer):
        position = (start + len(answer)) // 2
        return answer[:position] + bytes([answer[position] ^ 1]) + answer[position + 1 :]
    return answer


@contextlib.contextmanager
def serve_google_storage():
    """Run an emulator of Google Cloud Storage, to which this process and its children send their requests."""
    logging.getLogger("api").setLevel(logging.CRITICAL)  # it logs each object that is not found
    for name in ("gcp_storage_emulator", "gcsfs"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    store = GoogleStorage()
    os.environ.update(store.environment)
    fsspec.config.set_conf_env(fsspec.config.conf)  # which it reads at its import
    yield store
    for name in store.environment:
        os.environ.pop(name)
    store.close()


class S3:
    """Emulator of S3 behind a proxy that can misbehave: `requests`, `choose_fault` and `delay` of `GoogleStorage`."""

    def __init__(self):
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.requests = []
        self.choose_fault = lambda method, path: None
        self.delay = 0.0
        self._moto = ThreadedMotoServer("127.0.0.1", 0)
        self._moto.start()
        self.backend = self._moto.get_host_and_port()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), lambda *args: _Proxy(self, *args))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def make_bucket(self):
        """Return the URL of a new bucket."""
        return make_s3_bucket()

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._moto.stop()


class _Proxy(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # clients wait for "100 Continue" before they send a body

    def __init__(self, store, *args):
        self._store = store
        super().__init__(*args)

    def _serve(self):
        path = urllib.parse.unquote(self.path)
        fault = self._store.choose_fault(self.command, path)
        self._store.requests.append((self.command, path))
        time.sleep(self._store.delay)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.close_connection = True
        if fault == "stall":
            time.sleep(_STALL)
            return
        if fault in ("error", "html"):
            self._answer_unavailable(500 if fault == "html" else 503)
            return
        connection = http.client.HTTPConnection(*self._store.backend)
        headers = {name: x for name, x in self.headers.items() if name.lower() not in ("connection", "expect")}
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
        if fault == "lost":
            self._answer_unavailable(503)
            return
        lines = [f"HTTP/1.1 {answer.status} {answer.reason}", "Connection: close"]
        names = [name for name, _ in answer.getheaders()]
        lines += [f"{name}: {x}" for name, x in answer.getheaders() if name.lower() not in ("connection", _CHUNKED)]
        if self.command != "HEAD" and "Content-Length" not in names:
            lines.append(f"Content-Length: {len(content)}")
        head = "\r\n".join(lines).encode() + b"\r\n\r\n"
        with contextlib.suppress(ConnectionError):  # of a client that was killed
            self.wfile.write(damage(head + content, fault))

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

    def _answer_unavailable(self, status):
        page = b"<html><body><h1>Server Error</h1></body></html>" if status == 500 else b""
        self.send_response(status)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else page)

    def log_message(self, format, *args):
        pass


@contextlib.contextmanager
def serve_s3():
    """Run an emulator of S3, to which this process and its children send their requests."""
    store = S3()
    environment = dict(
        AWS_ENDPOINT_URL=store.url,
        AWS_ACCESS_KEY_ID="test",
        AWS_SECRET_ACCESS_KEY="test",
        AWS_DEFAULT_REGION="us-east-1",
        AWS_EC2_METADATA_DISABLED="true",
    )
    os.environ.update(environment)
    yield store
    for name in environment:
        os.environ.pop(name)
    store.close()


def make_s3_bucket():
    """Return the URL of a new bucket of the emulator of S3."""
    import s3fs

    name = f"bucket-{next(_NUMBERS)}"
    s3fs.S3FileSystem().mkdir(name)
    return f"s3://{name}"
