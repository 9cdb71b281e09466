"""Searches that run for the page: started, watched, stopped."""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import threading
import time
from typing import Any

from simpar.errors import InputError
from simpar.report.serve.state import Bases, State

SILENCE_S = 90.0
"""A browser lets a page in the background ask once a minute."""
MAX_JOBS = 2
"""Searches at a time, over all tabs."""


class Job:
    """One search; `report` is the last line it printed."""

    def __init__(self, state: State, bases: Bases) -> None:
        self.state = state
        self.report: dict[str, Any] = {}
        self.stopped = False
        self.asked = time.monotonic()
        given = json.dumps({"table": state.table(bases), "file": bases[state.base].file}, default=str)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "simpar.report.serve.search_process"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        threading.Thread(target=self._watch, args=(given,), daemon=True).start()

    def _watch(self, given: str) -> None:
        process = self._process
        if process.stdin is None or process.stdout is None or process.stderr is None:
            return
        try:
            process.stdin.write(given)
            process.stdin.close()
        except BrokenPipeError:
            pass
        for line in process.stdout:
            self.report = json.loads(line)
        trouble = process.stderr.read().strip().splitlines()
        process.wait()
        if not self.report.get("done") and not self.stopped:
            reason = trouble[-1] if trouble else f"exit code {process.returncode}"
            self.report = {**self.report, "done": True, "error": f"the search ended unexpectedly: {reason}"}

    @property
    def running(self) -> bool:
        """Whether more is to come."""
        return not self.stopped and not self.report.get("done")

    def stop(self) -> None:
        """End it; what it found stays."""
        if self.running:
            self.stopped = True
            self._process.terminate()


class Jobs:
    """The searches of all tabs."""

    def __init__(self, bases: Bases) -> None:
        self.bases = bases
        self._jobs: dict[str, Job] = {}
        self._lock = threading.Lock()
        atexit.register(self.stop_all)

    def start(self, tab: str, state: State) -> Job:
        """A new search for a tab; its earlier one ends.

        Raises:
            InputError: the settings are wrong, or too many searches run.
        """
        state.scenario(self.bases)
        with self._lock:
            if tab in self._jobs:
                self._jobs[tab].stop()
            self._drop_silent()
            if sum(j.running for j in self._jobs.values()) >= MAX_JOBS:
                raise InputError(f"{MAX_JOBS} searches run already, in other tabs: stop one of them or close its tab")
            self._jobs = {t: j for t, j in self._jobs.items() if j.running}
            self._jobs[tab] = Job(state, self.bases)
            return self._jobs[tab]

    def of(self, tab: str) -> Job | None:
        """The last search of a tab, which asks for it every now and then while it is open."""
        job = self._jobs.get(tab)
        if job is not None:
            job.asked = time.monotonic()
        return job

    def close(self, tab: str) -> None:
        """The tab is closed: so is its search."""
        with self._lock:
            job = self._jobs.pop(tab, None)
        if job is not None:
            job.stop()

    def _drop_silent(self) -> None:
        """A tab that was killed says nothing: its search ends once another wants to start."""
        for job in self._jobs.values():
            if time.monotonic() - job.asked > SILENCE_S:
                job.stop()

    def stop_all(self) -> None:
        """End them with the server."""
        for job in self._jobs.values():
            job.stop()
