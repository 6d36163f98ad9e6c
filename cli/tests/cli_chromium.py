"""A headless Chromium, driven by the Chrome DevTools Protocol over two pipes."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
# the protocol is on descriptors 3 and 4, which Popen cannot choose
_START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
_FLAGS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-sandbox", "--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
)


class Browser:
    """One tab. `requests` are the addresses that the page asked for, `messages` its errors."""

    def __init__(self, profile: Path) -> None:
        child_in, self._out = os.pipe()
        self._in, child_out = os.pipe()
        self._log = (profile / "chromium.log").open("wb")
        flags = (*_FLAGS, f"--user-data-dir={profile / 'profile'}")
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(child_in), str(child_out), PROGRAM, *flags],
            pass_fds=(child_in, child_out), stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
            start_new_session=True,
        )  # fmt: skip
        os.close(child_in)
        os.close(child_out)
        self._buffer = b""
        self._last = 0
        self._session = ""
        self.requests: list[str] = []
        self.messages: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the result of a command of the protocol."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last:
                assert "error" not in answer, answer
                return dict(answer["result"])
            self._note(answer)

    def emulate(self, width: int, height: int, scheme: str) -> None:
        """Set the size of the window and the color scheme that the user prefers."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.call("Emulation.setEmulatedMedia", features=features)

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, script: str, is_met: Callable[[Any], bool] = bool) -> Any:
        """Poll an expression until its value satisfies the condition; return the value."""
        deadline = time.monotonic() + 90
        while True:
            value = self.run(script)
            if is_met(value):
                return value
            assert time.monotonic() < deadline, (script, value)
            time.sleep(0.1)

    def press(self, key: str, code: int) -> None:
        """Press and release a key."""
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            extra = text if kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **extra)

    def screenshot(self) -> bytes:
        """Return a PNG of the whole page."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(found["data"])

    def close(self) -> None:
        """End the browser."""
        self._session = ""
        try:
            self.call("Browser.close")
            self._process.wait(30)
        except (OSError, EOFError, subprocess.TimeoutExpired):
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        finally:
            os.close(self._in)
            os.close(self._out)
            self._log.close()

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._in, 1 << 20)
            if not part:
                raise EOFError("Chromium has ended")
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(text))

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.messages.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.messages.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
