"""A headless Chromium, driven over a pipe by its DevTools protocol: pages, keys, and what goes wrong in them."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

MISSING = "chromium is missing; expected one on the path. On Debian: apt-get install -y chromium"
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_SECONDS = 60


def chromium() -> str | None:
    """The path of a Chromium, or None."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Browser:
    """A browser, for use in a `with` statement; `open` gives a page.

    Attributes:
        errors: what pages have reported on their console, and exceptions of their scripts.
        requests: addresses that pages have asked for.
    """

    def __init__(self) -> None:
        path = chromium()
        if path is None:
            raise RuntimeError(MISSING)
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._folder = tempfile.TemporaryDirectory(prefix="zephon-browser-", ignore_cleanup_errors=True)
        theirs, self._to = os.pipe()
        self._from, to_us = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--remote-debugging-pipe", "--disable-extensions", "--hide-scrollbars", "--force-color-profile=srgb"]
        # The browser reads from 3 and writes to 4.
        command = ["bash", "-c", f'exec "$@" 3<&{theirs} 4>&{to_us}', "bash", path, *flags]
        log = open(Path(self._folder.name) / "log", "wb")  # noqa: SIM115
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={self._folder.name}/profile"],
            pass_fds=(theirs, to_us),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        for file in (theirs, to_us):
            os.close(file)
        log.close()
        self._number, self._rest, self._session = 0, b"", ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._folder.cleanup()

    def open(self, page: Path, *, width: int = 1180, height: int = 900, dark: bool = False) -> None:
        """Show a file, and wait until its script says that it is done (`data-ready` of the body)."""
        target = self._call("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._session = ""
        self._session = self._call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        for domain in ("Runtime", "Log", "Network", "Page"):
            self._call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", {"features": [scheme]})
        self._call("Page.navigate", {"url": page.absolute().as_uri()})
        self.wait("document.body && document.body.dataset.ready === 'true'")

    def wait(self, condition: str) -> None:
        """Wait until an expression is true."""
        until = time.monotonic() + _SECONDS
        while not self.value(condition):
            if time.monotonic() > until:
                raise TimeoutError(f"{condition} stays false; the page has reported {self.errors}")
            time.sleep(0.05)

    def value(self, expression: str) -> Any:
        """The value of an expression in the page, as JSON types."""
        told = self._call("Runtime.evaluate", {"expression": expression, "returnByValue": True})
        if "exceptionDetails" in told:
            raise RuntimeError(f"{expression}: {told['exceptionDetails']}")
        return told["result"].get("value")

    def press(self, *keys: str) -> None:
        """Press keys by their names, as in "ArrowRight"."""
        codes = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Tab": 9, "Enter": 13, "Home": 36}
        for key in keys:
            for kind in ("rawKeyDown", "keyUp"):
                which = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
                self._call("Input.dispatchKeyEvent", {"type": kind, **which})

    def write(self, text: str) -> None:
        """Type text where the focus is."""
        self._call("Input.insertText", {"text": text})

    def screenshot(self, path: Path, selector: str = "") -> None:
        """A PNG of what an element covers, else of the whole page."""
        box = "document.documentElement" if not selector else f"document.querySelector({json.dumps(selector)})"
        rect = self.value(f"(r => [r.x + scrollX, r.y + scrollY, r.width, r.height])({box}.getBoundingClientRect())")
        clip = dict(zip(("x", "y", "width", "height"), rect, strict=True)) | {"scale": 1}
        told = self._call("Page.captureScreenshot", {"format": "png", "clip": clip, "captureBeyondViewport": True})
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(told["data"]))

    def _call(self, method: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters or {}}
        if self._session:
            message["sessionId"] = self._session
        content = json.dumps(message).encode() + b"\0"
        while content:
            content = content[os.write(self._to, content) :]
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer.get("method", ""), answer.get("params", {}))

    def _note(self, method: str, event: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(event["exceptionDetails"]))
        elif method == "Log.entryAdded" and event["entry"]["level"] in ("warning", "error"):
            self.errors.append(event["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("warning", "error", "assert"):
            self.errors.append(json.dumps(event["args"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._from], [], [], _SECONDS)[0]:
                raise TimeoutError("the browser does not answer")
            more = os.read(self._from, 1 << 20)
            if not more:
                log = (Path(self._folder.name) / "log").read_text(errors="replace")
                raise RuntimeError(f"the browser has ended: {log[-2000:]}")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        return answer
