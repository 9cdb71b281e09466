"""A small client of headless Chromium: the DevTools protocol over a pipe (JSON, each message ended by a zero byte)."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

CHROMIUM = next((p for p in ("/usr/bin/chromium", shutil.which("chromium")) if p and Path(p).exists()), None)
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
    "--remote-debugging-pipe", "--disable-background-networking", "--disable-extensions", "--mute-audio",
)  # fmt: skip

TEXTS = """
(() => {
  const found = [];
  for (const plot of document.querySelectorAll('.js-plotly-plot')) {
    const seen = [...plot.querySelectorAll('.xtick text, .ytick text, .legendtext, .xtitle, .ytitle, .annotation-text')]
      .map(e => [e.textContent, e.getBoundingClientRect()]).filter(([t, r]) => t.trim() && r.width > 0);
    const box = plot.getBoundingClientRect();
    for (const [t, r] of seen) if (r.left < box.left - 2 || r.right > box.right + 2 || r.bottom > box.bottom + 2)
      found.push('outside: ' + t);
    for (let i = 0; i < seen.length; i++) for (let j = i + 1; j < seen.length; j++) {
      const p = seen[i][1], q = seen[j][1];
      const w = Math.min(p.right, q.right) - Math.max(p.left, q.left), h = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
      if (w > 2 && h > 3) found.push(seen[i][0] + ' / ' + seen[j][0]);
    }
  }
  return found;
})()
"""
"""Texts of plotly figures that run into each other or over the edge."""


class Browser:
    """One page in one Chromium."""

    def __init__(self, width: int = 1280, height: int = 900) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="simpar-chromium-", ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # Chromium reads descriptor 3 and writes 4; copies above 9 cannot be hit while those are set up.
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out)]

        def arrange() -> None:
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        self._process = subprocess.Popen(
            [CHROMIUM or "chromium", *_FLAGS, f"--user-data-dir={self._home.name}", "about:blank"],
            preexec_fn=arrange, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for fd in (theirs_in, theirs_out, *ends):
            os.close(fd)
        self._buffer, self._count, self._session = b"", 0, ""
        self.console: list[str] = []
        target = next(t for t in self.send("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)
        os.close(self._in)
        self._process.terminate()
        self._process.wait(20)
        self._home.cleanup()

    def _receive(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._in], [], [], max(until - time.monotonic(), 0))[0]:
                raise TimeoutError("Chromium does not answer")
            data = os.read(self._in, 1 << 20)
            if not data:
                raise ConnectionError("Chromium has ended")
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(text))

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.console.append(json.dumps(params["exceptionDetails"])[:600])
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.console.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif message.get("method") == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.console.append(json.dumps(params["args"])[:600])

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to one command."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + 60
        while True:
            answer = self._receive(until)
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self._note(answer)

    def resize(self, width: int, height: int) -> None:
        """Size of the page."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def js(self, expression: str) -> Any:
        """The value of an expression (or promise) in the page."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def open(self, url: str) -> None:
        """Go to an address."""
        self.send("Page.navigate", url=url)

    def wait(self, expression: str, seconds: float = 30) -> None:
        """Until `expression` is true."""
        until = time.monotonic() + seconds
        while True:
            try:
                if self.js(f"!!({expression})"):
                    return
            except RuntimeError:
                pass  # The page is being replaced.
            if time.monotonic() > until:
                raise TimeoutError(f"not true within {seconds} s: {expression}; console: {self.console}")
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        """Text of an element, empty where there is none."""
        return str(self.js(f"(document.querySelector({json.dumps(selector)}) || {{}}).innerText || ''"))

    def click(self, selector: str) -> None:
        """Click an element."""
        self.js(f"document.querySelector({json.dumps(selector)}).click()")

    def key(self, name: str, code: int, text: str = "") -> None:
        """Press and release a key."""
        extra = {"text": text} if text else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=name, code=name, windowsVirtualKeyCode=code, **extra)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=name, code=name, windowsVirtualKeyCode=code)

    def focus(self, selector: str) -> None:
        """Put the focus on an element."""
        self.js(f"document.querySelector({json.dumps(selector)}).focus()")

    def enter(self, selector: str, value: str) -> None:
        """Replace an input's content, as typed, and leave it."""
        self.focus(selector)
        self.js(f"document.querySelector({json.dumps(selector)}).select()")
        self.send("Input.insertText", text=value)
        self.key("Enter", 13, "\r")

    def downloads_to(self, folder: Path) -> None:
        """Where downloads go."""
        self.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))

    def shot(self, path: Path, full: bool = True) -> None:
        """A picture of the page."""
        image = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        path.write_bytes(base64.b64decode(image["data"]))
