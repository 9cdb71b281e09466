"""What stands before the page of `simpar serve`: who may ask, how much, how long; slow answers disturb nobody."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("dash", reason="the ui extra (Dash) is not installed")
from werkzeug.serving import make_server

from simpar.report.serve import front
from simpar.report.serve.app import make_app
from simpar.report.serve.callbacks import _CONTROLS
from simpar.report.serve.front import CLOSED, HEADERS, MAX_BODY, UPDATE, Front, Pool
from simpar.report.serve.page import value_id
from simpar.report.serve.search_job import Jobs
from simpar.report.serve.state import Bases

SMALL = "zero-7.5b_a100x64_zero3"


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[int, Pool, list[str]]]:
    """(Port, workers, tabs that said that they close) of a page with a short time limit."""
    app, closed = make_app(), list[str]()
    pool = Pool(None, None, size=2, limit_s=20.0)
    server = make_server("127.0.0.1", 0, Front(app.server, pool, "127.0.0.1", closed.append), threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_port, pool, closed
    server.shutdown()
    pool.stop()


def ask(port: int, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request(method, path, body, {k.replace("_", "-"): v for k, v in headers.items()})
    found = connection.getresponse()
    return found.status, dict(found.getheaders()), found.read()


def compute(port: int, base: str, tab: str, more: str = "") -> tuple[int, Any]:
    """The page's main callback: everything that follows from the controls."""
    _, _, dependencies = ask(port, "GET", "/_dash-dependencies")
    output = next(d["output"] for d in json.loads(dependencies) if "wrong.children" in d["output"] and "whole.data" in d["output"])
    values = Bases()[base].values
    parts = [p.rsplit(".", 1) for p in output.strip(".").split("...")]
    body = {
        "output": output, "outputs": [{"id": i, "property": p} for i, p in parts], "changedPropIds": ["base.value"],
        "inputs": [{"id": "base", "property": "value", "value": base}, {"id": "more", "property": "value", "value": more},
                   {"id": "config", "property": "data", "value": ""}, {"id": "site", "property": "data", "value": ""},
                   *({"id": value_id(k), "property": "value", "value": values.get(k)} for k in _CONTROLS)],
        "state": [{"id": "tab", "property": "data", "value": tab}],
    }  # fmt: skip
    status, _, data = ask(port, "POST", UPDATE, json.dumps(body).encode(), Content_Type="application/json")
    return status, json.loads(data) if status == 200 else data


def wrong(answer: Any) -> str:
    return json.dumps(answer["response"]["wrong"]["children"])


def test_headers_are_on_every_answer(served: tuple[int, Pool, list[str]]) -> None:
    port = served[0]
    for method, path in (("GET", "/"), ("GET", "/_dash-layout"), ("GET", "/nothing"), ("POST", UPDATE)):
        _, headers, _ = ask(port, method, path, b"x" if method == "POST" else b"")
        assert {name: headers.get(name) for name, _ in HEADERS} == dict(HEADERS)
    assert "frame-ancestors 'none'" in dict(HEADERS)["Content-Security-Policy"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "localhost.evil.example"}, 403),
        ({"Host": "127.1"}, 403),
        ({"Host": "LOCALHOST"}, 200),
        ({"Host": "[::1]:80"}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "localhost:1", "Origin": "http://localhost:1"}, 200),
        ({"Host": "localhost:1", "Origin": "http://localhost:2"}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 200),
    ],
)
def test_only_the_page_itself_may_ask(served: tuple[int, Pool, list[str]], headers: dict[str, str], status: int) -> None:
    assert ask(served[0], "GET", "/", **headers)[0] == status


def test_another_site_may_not_post(served: tuple[int, Pool, list[str]]) -> None:
    assert ask(served[0], "POST", UPDATE, b"{}", Sec_Fetch_Site="cross-site")[0] == 403
    assert ask(served[0], "POST", CLOSED, b"tab", Origin="https://evil.example")[0] == 403


@pytest.mark.parametrize(
    "body", [b"", b"x", b"[]", b"[" * 9999, b"{}", b'{"output": 1}', b'{"output": "a.b", "state": 5}', b"\xff"]
)
def test_a_body_that_is_none(served: tuple[int, Pool, list[str]], body: bytes) -> None:
    status, _, text = ask(served[0], "POST", UPDATE, body)
    assert (status, text) == (400, b"not a callback of this page")


def test_a_body_is_bounded(served: tuple[int, Pool, list[str]]) -> None:
    port = served[0]
    assert ask(port, "POST", UPDATE, b" " * (MAX_BODY + 1))[0] == 413
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("POST", UPDATE, iter([b"a", b"b"]), encode_chunked=True)
    assert connection.getresponse().status == 411


def test_an_answer_comes_from_a_worker(served: tuple[int, Pool, list[str]]) -> None:
    status, answer = compute(served[0], SMALL, "a")
    assert status == 200
    assert answer["response"]["wrong"]["children"] is None
    assert "tok" in json.dumps(answer["response"]["tiles"])


def test_what_is_too_large_is_said_at_once(served: tuple[int, Pool, list[str]]) -> None:
    compute(served[0], SMALL, "a")
    started = time.monotonic()
    status, answer = compute(served[0], SMALL, "a", "cluster.num_nodes=100000000\ntraining.global_batch_size=800000000")
    assert status == 200
    assert "more than 10,000,000 GPUs" in wrong(answer)
    assert time.monotonic() - started < 5


def test_a_slow_request_ends_with_its_worker_and_disturbs_no_other_tab(
    served: tuple[int, Pool, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that never answers: its tab is told so, another tab has its answer meanwhile."""
    port, pool, _ = served
    compute(port, SMALL, "fast")
    monkeypatch.setattr(front, "_work", _silent)
    told: list[Any] = []
    with pool._free:
        kept, pool._idle = pool._idle, []
        pool._count = 0
    slow = threading.Thread(target=lambda: told.append(compute(port, SMALL, "slow")))
    monkeypatch.setattr(pool, "limit_s", 3.0)
    slow.start()
    time.sleep(0.5)
    with pool._free:
        pool._idle, pool._count = kept, pool._count + len(kept)
    started = time.monotonic()
    assert "tok" in json.dumps(compute(port, SMALL, "fast")[1]["response"]["tiles"])
    assert time.monotonic() - started < 3.0
    slow.join()
    ((status, answer),) = told
    assert status == 200
    assert "took longer than 3 s" in wrong(answer)
    assert pool._count == len(kept)


def _silent(pipe: Any, *_: Any) -> None:
    pipe.send("ready")
    time.sleep(600)


def test_an_outdated_request_is_not_worked_out(served: tuple[int, Pool, list[str]]) -> None:
    pool = served[1]
    assert pool.ask("x", b"{}", lambda: True) is None


def test_a_closed_tab_frees_its_search(served: tuple[int, Pool, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    port, _, closed = served
    assert ask(port, "POST", CLOSED, b"tab-7")[0] == 204
    assert closed == ["tab-7"]

    class Search:
        running, asked = True, 0.0

        def stop(self) -> None:
            self.running = False

    jobs, first, second = Jobs(Bases()), Search(), Search()
    jobs._jobs = {"a": first, "b": second}  # type: ignore[dict-item]
    jobs.close("a")
    assert not first.running
    assert jobs.of("a") is None
    assert jobs.of("b") is not None  # it asks: it is there
    jobs._drop_silent()
    assert second.running
    second.asked -= 1000.0
    jobs._drop_silent()
    assert not second.running


def test_the_command_stops(tmp_path: Path) -> None:
    import signal
    import subprocess
    import sys

    process = subprocess.Popen([sys.executable, "-m", "simpar", "serve", "--port", "0"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "http://127.0.0.1:" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) in (0, 130)
