"""An S3 server for tests: moto's, over HTTP in a thread of this process, with the faults that a test asks for."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

boto3 = pytest.importorskip("boto3")
moto_server = pytest.importorskip("moto.moto_server.werkzeug_app")
werkzeug = pytest.importorskip("werkzeug.serving")
s3fs = pytest.importorskip("s3fs")

BUCKET = "runs"
_CODES = {403: "AccessDenied", 412: "PreconditionFailed", 500: "InternalError", 503: "ServiceUnavailable"}


class Faults:
    """moto's server. It answers 500, 503 or 412 to the next request of a method when a test says so, or gives wrong
    answers, or none, again and again."""

    def __init__(self) -> None:
        self._server = moto_server.DomainDispatcherApplication(moto_server.create_backend_app)
        self.left: list[tuple[str, int, bool]] = []
        """(method, status, whether the request is done before it fails) of the request that will fail"""
        self.lonely = 0
        """Requests that waited in vain for a second one."""
        self.read_only = False
        """Answer 403 to everything that would change an object."""
        self.unconditional = False
        """Ignore the condition of a conditional PUT, as some servers do."""
        self.every = 0
        """Fail every so many requests, in one of three ways by turns; 0: none."""
        self._numbers, self._ways = itertools.count(1), itertools.count()
        self._awaited, self._arrived, self._changed = "", 0, threading.Condition()
        self.seen: list[tuple[str, str]] = []
        """(method, path) of all requests, in the order of their arrival."""

    def fail(self, method: str, status: int, *, after: bool = False) -> None:
        """Fail the next request of a method, before or `after` the server has done what it asks for."""
        self.left = [(method, status, after)]

    def expect_two(self, method: str) -> None:
        """Let requests of a method for an array's files wait until a second one is there."""
        self._awaited, self._arrived, self.lonely = method, 0, 0

    def _meet(self) -> None:
        with self._changed:
            self._arrived += 1
            self._changed.notify_all()
            self.lonely += not self._changed.wait_for(lambda: self._arrived >= 2, timeout=60)

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        method = environ["REQUEST_METHOD"]
        self.seen.append((method, environ["PATH_INFO"]))
        if method == self._awaited and "/c." in environ["PATH_INFO"]:
            self._meet()
        if self.unconditional:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        if self.read_only and method in ("PUT", "POST", "DELETE"):
            return _answer(403, start_response)
        if self.every and next(self._numbers) % self.every == 0:
            return self._failing(next(self._ways) % 3, environ, start_response)
        if not self.left or self.left[0][0] != method:
            return self._server(environ, start_response)
        _, status, after = self.left.pop(0)
        if after:
            self._done(environ)
        return _answer(status, start_response)

    def _failing(self, way: int, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Fail a request: refuse it for now, or do it and lose the answer, or do it and answer with an error."""
        if way == 0:
            return _answer(503, start_response)
        self._done(environ)
        if way == 1:
            environ["werkzeug.socket"].close()
        return _answer(500, start_response)

    def _done(self, environ: dict[str, Any]) -> None:
        for _ in self._server(environ, lambda *_: None):
            pass


def _answer(status: int, start_response: Callable[..., Any]) -> Iterable[bytes]:
    start_response(f"{status} {_CODES[status]}", [("Content-Type", "application/xml")])
    return [f"<Error><Code>{_CODES[status]}</Code><Message>not now</Message></Error>".encode()]


@contextmanager
def serving(faults: Faults) -> Iterator[str]:
    """Serve S3 with one bucket, to this process and its children. Yield the bucket's URL."""
    server = werkzeug.make_server("127.0.0.1", 0, faults, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.port}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", endpoint)
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_MAX_ATTEMPTS", "1")  # the client's own retries would hide ours
        boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket=BUCKET)
        s3fs.S3FileSystem.clear_instance_cache()
        yield f"s3://{BUCKET}"
        s3fs.S3FileSystem.clear_instance_cache()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def faults() -> Faults:
    """The faults of the module's server, none at first."""
    return Faults()


@pytest.fixture(scope="module")
def bucket(faults: Faults) -> Iterator[str]:
    """The URL of a bucket on a server of the module's own."""
    with serving(faults) as url:
        yield url
