"""A headless Chromium, asked over its debugging pipe: what a page logs, its width, a picture."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
SECONDS = 60.0
# The browser reads from descriptor 3 and writes to 4.
BETWEEN = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(one), fcntl.F_DUPFD, 10) for one in sys.argv[1:3]]
for number, end in enumerate(ends, start=3):
    os.dup2(end, number)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def installed() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of it."""

    def __init__(self, process: subprocess.Popen[bytes], to: int, back: int) -> None:
        self._process, self._to, self._back = process, to, back
        self._number, self._rest, self._session = 0, b"", ""
        self.said: list[str] = []  # errors and warnings of the console
        self.asked: list[str] = []  # addresses
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for name in ("Runtime", "Log", "Page", "Network"):
            self.call(f"{name}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == number:
                assert "error" not in found, found
                return found["result"]
            self._note(found)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = os.read(self._back, 1 << 16)
            assert read, "the browser has ended"
            self._rest += read
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)

    def _note(self, event: dict[str, Any]) -> None:
        kind, what = event.get("method"), event.get("params", {})
        if kind == "Runtime.exceptionThrown":
            self.said.append(json.dumps(what["exceptionDetails"])[:500])
        elif kind == "Runtime.consoleAPICalled" and what["type"] in ("error", "warning", "assert"):
            self.said.append(json.dumps(what["args"])[:500])
        elif kind == "Log.entryAdded" and what["entry"]["level"] in ("error", "warning"):
            self.said.append(json.dumps(what["entry"])[:500])
        elif kind == "Network.requestWillBeSent":
            self.asked.append(what["request"]["url"])

    def show(self, address: str, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Load a page, and wait until it is drawn."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=address)
        self.wait("document.documentElement?.dataset.drawn === 'true'")

    def value(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, expression: str) -> None:
        end = time.monotonic() + SECONDS
        while not self.value(expression):
            assert time.monotonic() < end, f"never: {expression}"
            time.sleep(0.1)

    def picture(self, path: Path, *, whole: bool = False) -> None:
        found = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def open_browser() -> Iterator[Browser]:
    name = installed()
    assert name is not None
    to_read, to_write = os.pipe()
    back_read, back_write = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [
                *(sys.executable, "-c", BETWEEN, str(to_read), str(back_write)),
                *(name, *FLAGS, f"--user-data-dir={folder}"),
            ],
            pass_fds=(to_read, back_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(back_write)
        try:
            yield Browser(process, to_write, back_read)
        finally:
            process.terminate()
            process.wait()
            os.close(to_write)
            os.close(back_read)
