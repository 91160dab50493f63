"""A real S3 server on this machine, behind a proxy that breaks what it is told to break."""

import http.client
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import cast

import pytest

from effasr.untrusted import remote

BUCKET = "corpus"
_HOP = {"connection", "transfer-encoding", "content-length", "server", "date"}
_EXPIRED = (
    b"<?xml version='1.0'?><Error><Code>ExpiredToken</Code>"
    b"<Message>The provided token has expired.</Message></Error>"
)


class Proxy(ThreadingHTTPServer):
    """Forwards requests; ``faults`` has what happens to the next ones whose path has a text."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = port
        self.faults: list[tuple[str, str, str]] = []  # method, part of the path, fault
        self.always: dict[str, str] = {}  # a fault for each part of a path, until it is removed
        self.is_down = False
        self.requests: list[tuple[str, str]] = []
        self.lock = threading.Lock()

    def fault(self, method: str, path: str) -> str:
        with self.lock:
            self.requests.append((method, path))
            for text, fault in self.always.items():
                if text in path:
                    return fault
            for entry in self.faults:
                if entry[0] == method and entry[1] in path:
                    self.faults.remove(entry)
                    return entry[2]
        return "reset" if self.is_down else ""

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients may go away."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _forward(self) -> None:
        proxy = cast("Proxy", self.server)
        fault = proxy.fault(self.command, self.path)
        length = int(self.headers.get("content-length", 0))
        body = self.rfile.read(length) if length else None
        if fault == "reset":
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.close_connection = True
            self.connection.close()
            return
        if fault in ("500", "expired"):
            status, answer = (500, b"") if fault == "500" else (403, _EXPIRED)
            self._answer(status, {"Content-Type": "application/xml"}, answer, len(answer))
            return
        upstream = http.client.HTTPConnection("127.0.0.1", proxy.target)
        headers = {name: value for name, value in self.headers.items()}
        upstream.request(self.command, self.path, body, headers)
        answer = upstream.getresponse()
        content = answer.read()
        upstream.close()
        size = int(answer.headers.get("content-length") or len(content))
        if fault == "truncate":
            content, self.close_connection = content[: len(content) // 2], True
        if fault == "slow":
            time.sleep(1)
        self._answer(answer.status, dict(answer.headers), content, size)

    def _answer(self, status: int, headers: dict[str, str], content: bytes, size: int) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in _HOP:
                self.send_header(name, value)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _forward

    def log_message(self, format: str, *arguments: object) -> None:
        """Be silent."""


class Store:
    """The server: ``url`` of its bucket, the ``proxy``, and copies of folders."""

    url = f"s3://{BUCKET}"

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy

    def upload(self, folder: Path, name: str) -> str:
        filesystem().put(f"{folder}/", f"{BUCKET}/{name}/", recursive=True)
        return f"{self.url}/{name}"

    def names(self, prefix: str) -> list[str]:
        files = filesystem()
        files.invalidate_cache()
        start = f"{BUCKET}/{prefix}"
        return sorted(name.removeprefix(f"{start}/") for name in files.find(start))


def forget() -> None:
    """Begin as another process does."""
    remote._localized.cache_clear()
    remote._archive_size.cache_clear()
    remote._broken.clear()
    filesystem().invalidate_cache()


def filesystem():
    import fsspec

    return fsspec.filesystem("s3")


@contextmanager
def object_store(cache: Path) -> Iterator[Store]:
    pytest.importorskip("s3fs", reason="needs s3fs, of the extra `remote`")
    server = pytest.importorskip("moto.server", reason="needs moto[s3,server]")
    moto = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    reset = http.client.HTTPConnection(*moto.get_host_and_port())
    reset.request("POST", "/moto-api/reset")  # what earlier servers of this process had
    reset.getresponse().read()
    proxy = Proxy(moto.get_host_and_port()[1])
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.server_port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_MAX_ATTEMPTS", "1")
        patch.setenv("EFFASR_REMOTE_CACHE", str(cache))
        patch.setenv("EFFASR_REMOTE_PATIENCE", os.environ.get("EFFASR_REMOTE_PATIENCE", "30"))
        patch.setattr(remote, "_FIRST_PAUSE_S", 0.01)
        filesystem().clear_instance_cache()
        filesystem().mkdir(BUCKET)
        try:
            yield Store(proxy)
        finally:
            forget()
            filesystem().clear_instance_cache()
            proxy.shutdown()
            proxy.server_close()
            moto.stop()
