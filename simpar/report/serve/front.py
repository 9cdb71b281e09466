"""What stands before the page: who may ask, how much, for how long. Answers are worked out in processes that can be killed.

The server's own process serves the page and watches searches, which is quick; every other request goes to one of a few workers,
each with the whole application in it. A request that takes too long ends with its worker, and no other tab waits for it.
"""

from __future__ import annotations

import io
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Final
from urllib.parse import urlsplit

from simpar.boundary import parse_json
from simpar.errors import InputError
from simpar.host import follow_parent, interrupts_held

LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
UPDATE: Final = "/_dash-update-component"
CLOSED: Final = "/closed"
"""Where a tab that is being closed says so."""
REFUSED: Final = "simpar.refused"
"""Key of a WSGI environment: why a request is not worked out; the page then says it where it says what is wrong."""
MAX_BODY: Final = 2**23
"""A dropped log is the largest; what it holds beyond is for `simpar run read`."""
LIMIT_S: Final = 30.0
"""A request's longest time in a worker."""
WORKERS: Final = 4
HEADERS: Final = (
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    (
        "Content-Security-Policy",
        # Dash writes its settings and our callbacks into the page as inline scripts, and Plotly compiles functions.
        "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
)

Reply = tuple[int, list[tuple[str, str]], bytes]
StartResponse = Callable[..., Any]


class TooLongError(Exception):
    """A request took more than its time, or its worker died."""


# -- workers ---------------------------------------------------------------------------------------------------------------


def _work(pipe: Connection, arguments: tuple[Any, ...]) -> None:
    """A worker process: the application, asked through a pipe until that closes."""
    follow_parent()
    import logging

    from simpar.report.serve.app import make_app

    logging.disable(logging.ERROR)  # what somebody sends by hand is answered, not told to the terminal
    app = make_app(*arguments)
    client = app.server.test_client()
    pipe.send("ready")
    with suppress(EOFError, OSError):
        while True:
            body = pipe.recv_bytes()
            answer = client.post(UPDATE, data=body, content_type="application/json")
            pipe.send((answer.status_code, list(answer.headers), answer.data))


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    tab: str = ""
    """The last one that it answered: what it remembers is that tab's."""
    ready: bool = False

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Pool:
    """Up to `size` workers, started when there is work for them.

    Args:
        arguments: of `make_app`.
        limit_s: longest time of a request; starting a worker is not counted.
    """

    def __init__(self, *arguments: Any, size: int = WORKERS, limit_s: float = LIMIT_S) -> None:
        self._arguments, self._size, self.limit_s = arguments, size, limit_s
        self._context = multiprocessing.get_context("spawn")
        self._idle: list[_Worker] = []
        self._count = 0
        self._free = threading.Condition()

    def warm(self) -> None:
        """Start a worker before anybody asks."""
        with self._free:
            self._count += 1
            self._idle.append(self._hire())

    def ask(self, tab: str, body: bytes, outdated: Callable[[], bool] = lambda: False) -> Reply | None:
        """The application's answer to a callback's body; None where the request is `outdated` when its turn comes.

        Raises:
            TooLongError: no worker was free, or this one was not done, in time.
        """
        worker = self._take(tab)
        try:
            if outdated():
                self._give(worker)
                return None
            if not worker.ready:
                if not worker.pipe.poll(60.0):
                    raise TooLongError
                worker.pipe.recv()
                worker.ready = True
            worker.tab = tab
            worker.pipe.send_bytes(body)
            if not worker.pipe.poll(self.limit_s):
                raise TooLongError
            reply: Reply = worker.pipe.recv()
        except (EOFError, OSError, TooLongError):
            worker.stop()
            with self._free:
                self._count -= 1
                self._free.notify()
            raise TooLongError from None
        self._give(worker)
        return reply

    def stop(self) -> None:
        """End those that wait."""
        with self._free:
            for worker in self._idle:
                worker.stop()
            self._count -= len(self._idle)
            self._idle.clear()

    def _hire(self) -> _Worker:
        mine, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(theirs, self._arguments), daemon=True)
        with interrupts_held():
            process.start()
        theirs.close()
        return _Worker(process, mine)

    def _take(self, tab: str) -> _Worker:
        with self._free:
            if not self._idle and self._count >= self._size and not self._free.wait_for(lambda: self._idle, self.limit_s):
                raise TooLongError
            if self._idle:
                found = next((w for w in self._idle if w.tab == tab), self._idle[0])
                self._idle.remove(found)
                return found
            self._count += 1
        return self._hire()

    def _give(self, worker: _Worker) -> None:
        with self._free:
            self._idle.append(worker)
            self._free.notify()


# -- requests --------------------------------------------------------------------------------------------------------------


class Front:
    """The WSGI application that is served.

    Args:
        app: the page's own, for what is quick.
        pool: who answers the rest.
        host: that the server listens at.
        closed: told the id of a tab that is closed.
    """

    def __init__(self, app: Callable[..., Iterable[bytes]], pool: Pool, host: str, closed: Callable[[str], None]) -> None:
        self._app, self._pool, self._host, self._closed = app, pool, host, closed
        self._newest: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        """One request."""
        status, text = self._refusal(environ)
        if status:
            return _plain(start_response, status, text)
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if environ["PATH_INFO"] == CLOSED and environ["REQUEST_METHOD"] == "POST":
            self._closed(body[:64].decode("ascii", "replace"))
            return _plain(start_response, "204 No Content", "")
        if environ["PATH_INFO"] == UPDATE and environ["REQUEST_METHOD"] == "POST":
            try:
                asked = _asked(body)
            except InputError:
                return _plain(start_response, "400 Bad Request", "not a callback of this page")
            if asked is not None:
                return self._answer(asked, body, environ, start_response)
        return self._own(environ, body, start_response)

    def _refusal(self, environ: dict[str, Any]) -> tuple[str, str]:
        """Status and reason where the request is not taken at all."""
        host = str(environ.get("HTTP_HOST", ""))
        if self._host in LOOPBACK and _name(host) not in LOOPBACK:
            return "403 Forbidden", "this page answers to its own address only"
        origin = environ.get("HTTP_ORIGIN")
        if environ.get("HTTP_SEC_FETCH_SITE") == "cross-site" and environ["REQUEST_METHOD"] != "GET":
            return "403 Forbidden", "asked for by another site"
        if origin is not None and urlsplit(str(origin)).netloc.lower() != host.lower():
            return "403 Forbidden", "asked for by another site"
        length = str(environ.get("CONTENT_LENGTH") or "0")
        if environ["REQUEST_METHOD"] == "POST" and "chunked" in str(environ.get("HTTP_TRANSFER_ENCODING", "")).lower():
            return "411 Length Required", "a body needs its length"
        if not length.isdigit() or int(length) > MAX_BODY:
            return "413 Content Too Large", f"a request holds at most {MAX_BODY} bytes"
        return "", ""

    def _answer(
        self, asked: tuple[str, str], body: bytes, environ: dict[str, Any], start_response: StartResponse
    ) -> Iterable[bytes]:
        with self._lock:
            if len(self._newest) > 1000:
                self._newest.clear()
            ticket = self._newest[asked] = time.monotonic_ns()

        def outdated() -> bool:
            return bool(asked[0]) and self._newest.get(asked, 0) > ticket

        try:
            reply = self._pool.ask(asked[0], body, outdated)
        except TooLongError:
            limit = f"took longer than {self._pool.limit_s:g} s, the most that this page spends on an answer"
            environ[REFUSED] = f"this {limit}; a smaller model, batch or cluster, or `simpar simulate` on the command line"
            return self._own(environ, body, start_response)
        if reply is None:
            return _plain(start_response, "204 No Content", "")
        status, headers, data = reply
        start_response(f"{status} {'OK' if status < 400 else 'Error'}", [*_without(headers), *HEADERS])
        return [data]

    def _own(self, environ: dict[str, Any], body: bytes, start_response: StartResponse) -> Iterable[bytes]:
        def start(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            return start_response(status, [*_without(headers), *HEADERS], *rest)

        return self._app({**environ, "wsgi.input": io.BytesIO(body)}, start)


def _asked(body: bytes) -> tuple[str, str] | None:
    """(tab, what is to change) of a callback for a worker; None for one of the search, which this process watches.

    Raises:
        InputError: no callback.
    """
    try:
        table = parse_json(body.decode("utf-8"), "request")
    except UnicodeDecodeError as error:
        raise InputError(str(error)) from None
    output = table.get("output") if isinstance(table, dict) else None
    states = table.get("state") or [] if isinstance(table, dict) else []
    if not isinstance(output, str) or not isinstance(states, list):
        raise InputError("no callback")
    if "search.children" in output:
        return None
    tab = next((s.get("value") for s in states if isinstance(s, dict) and s.get("id") == "tab"), "")
    return str(tab)[:64], output


def _name(host: str) -> str:
    """A Host header's name in small letters, without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.lower() if host.count(":") > 1 else host.partition(":")[0].lower()


def _without(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    own = {name.lower() for name, _ in HEADERS}
    return [(name, value) for name, value in headers if name.lower() not in own]


def _plain(start_response: StartResponse, status: str, text: str) -> Iterable[bytes]:
    data = text.encode()
    start_response(status, [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(data))), *HEADERS])
    return [data]


def refused() -> None:
    """In a callback: stop where the request is not to be worked out.

    Raises:
        InputError: it is not, and why.
    """
    from flask import has_request_context, request

    if has_request_context() and (text := request.environ.get(REFUSED)):
        raise InputError(str(text))
