"""A page in headless Chromium, driven by the DevTools protocol over pipes: no package is needed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
WITHOUT = f"needs one of {', '.join(NAMES)}: apt-get install chromium"
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions",
    "--disable-dev-shm-usage", "--remote-debugging-pipe", "--disable-background-networking",
)  # fmt: skip
ASKED, TOLD = 3, 4  # the browser reads and writes messages there, each ended by a zero byte
WAIT_S = 30


class Page:
    """One page."""

    def __init__(self, asks: int, hears: int) -> None:
        self.asks, self.hears = asks, hears
        self.sent, self.rest, self.session = 0, b"", ""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        found = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self.session = found["sessionId"]
        self.send("Page.enable")

    def send(self, method: str, **params: object) -> dict[str, Any]:
        """Send a command; return its result."""
        self.sent += 1
        message = {"id": self.sent, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.asks, json.dumps(message).encode() + b"\0")
        while (told := self._message()).get("id") != self.sent:
            pass  # an event
        assert "error" not in told, told
        return dict(told["result"])

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            new = os.read(self.hears, 1 << 16)
            assert new, "the browser has ended"
            self.rest += new
        first, _, self.rest = self.rest.partition(b"\0")
        return dict(json.loads(first))

    def value(self, script: str) -> Any:
        """Return the value of an expression of JavaScript."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, script: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + WAIT_S
        while not self.value(script):
            assert time.monotonic() < deadline, f"{script}\n{self.value('document.body.innerText')}"
            time.sleep(0.01)

    def click(self, selector: str) -> None:
        """Click in the middle of an element that is seen."""
        self.value(f"document.querySelector('{selector}').scrollIntoView()")
        box = self.value(f"document.querySelector('{selector}').getBoundingClientRect().toJSON()")
        assert box["width"] and box["height"], selector
        at = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    def write(self, text: str) -> None:
        """Write where the focus is."""
        self.send("Input.insertText", text=text)

    def enter(self, shift: bool = False) -> None:
        """Press Enter."""
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, modifiers=8 * shift, **key)

    def resize(self, width: int, height: int) -> None:
        """Give the page this size, in pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)

    def picture(self, path: Path) -> None:
        """Write a PNG of what is seen."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))


@contextmanager
def opened(address: str, folder: Path) -> Iterator[Page]:
    """Show an address; the browser's files, and what it downloads, are in `folder`."""
    assert CHROMIUM is not None, WITHOUT
    (asked, asks), (hears, told) = os.pipe(), os.pipe()
    # dup2 to numbers that may be among these: first beyond them
    move = f'exec {ASKED}<&"$1" {TOLD}>&"$2"; shift 2; exec "$@"'
    line = ["bash", "-c", move, "bash", str(asked), str(told), CHROMIUM, *OPTIONS]
    line.append(f"--user-data-dir={folder / 'profile'}")
    browser = subprocess.Popen(
        line, pass_fds=(asked, told), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(asked)
    os.close(told)
    try:
        page = Page(asks, hears)
        page.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
        page.resize(1000, 700)
        page.send("Page.navigate", url=address)
        page.until("document.readyState === 'complete'")
        yield page
        page.session = ""
        page.send("Browser.close")
        browser.wait(WAIT_S)
    finally:
        browser.kill()
        browser.wait()
        os.close(asks)
        os.close(hears)
