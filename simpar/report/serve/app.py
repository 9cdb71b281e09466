"""The server of the page: bound to this machine, nothing read but the registries."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from simpar.errors import InputError, Violation
from simpar.report.serve.front import LOOPBACK, Front, Pool
from simpar.report.serve.my_runs import ReadRuns
from simpar.specs.scenario import Scenario

Export = Callable[[Scenario], str]
"""A scenario's launch script as text; raises InputError where the framework cannot run it."""


def make_app(
    scenario: Path | None = None, export: Export | None = None, site: Path | None = None, runs: ReadRuns | None = None
) -> Any:
    """The Dash application, not yet served.

    Args:
        scenario: one of the user's own to start from.
        export: writes a scenario's launch script; none = the page offers no such download.
        site: what was learned from a cluster's own runs; every answer is that of this site.
        runs: reads a log that is dropped on the page; none = the page offers no such question.

    Raises:
        InputError: Dash is not installed, or the scenario breaks a rule.
    """
    try:
        from dash import Dash
    except ImportError:
        raise InputError("simpar serve needs Dash, which is not installed; install it with: pip install 'simpar[ui]'") from None

    from simpar.report.serve.answer import Answers
    from simpar.report.serve.callbacks import register
    from simpar.report.serve.page import page
    from simpar.report.serve.state import Bases
    from simpar.report.serve.style import INDEX

    bases = Bases(scenario, site)
    app = Dash(
        "simpar", title="simpar: what if", update_title="", assets_folder="no-assets", index_string=INDEX,
        meta_tags=[{"name": "viewport", "content": "width=device-width, initial-scale=1"}],
    )  # fmt: skip
    app.layout = lambda: page(bases, can_export=export is not None, can_read=runs is not None)
    app.searches = register(app, Answers(bases), export, runs)
    return app


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to host and port.

    Raises:
        InputError: the port is taken or not permitted, or the host is not this machine's.
    """
    if not 0 <= port <= 65535:
        raise InputError([Violation("--port", port, "is not a port", "0 (any free one) to 65535")])
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        found.listen(64)
    except OSError as error:
        found.close()
        if isinstance(error, socket.gaierror) or error.errno in (99, 49):
            raise InputError([Violation("--host", host, "is not an address of this machine", "such as 127.0.0.1")]) from None
        rule = f"cannot be listened on at {host}: {error.strerror or error}"
        raise InputError([Violation("--port", port, rule, "choose another port, or 0 for any free one")]) from None
    return found


def serve(
    host: str = "127.0.0.1", port: int = 8050, scenario: Path | None = None, export: Export | None = None, site: Path | None = None,
    runs: ReadRuns | None = None,
) -> None:  # fmt: skip
    """Serve the page until interrupted.

    Raises:
        InputError: Dash is missing, the scenario is wrong, the port is taken.
    """
    app = make_app(scenario, export, site, runs)
    bound = listen(host, port)
    import logging

    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    shown = f"[{host}]" if ":" in host else host
    port = bound.getsockname()[1]
    pool = Pool(scenario, export, site, runs)
    pool.warm()
    server = make_server(host, port, Front(app.server, pool, host, app.searches.close), threaded=True, fd=bound.fileno())
    _say(f"simpar serve: http://{shown}:{port}/ (stop with Ctrl-C)")
    if host not in LOOPBACK:
        _say("simpar serve: reachable from other machines, without a password")
    try:
        server.serve_forever()
    finally:
        pool.stop()


def _say(text: str) -> None:
    from rich.console import Console

    Console().print(text, markup=False, highlight=False, soft_wrap=True)
