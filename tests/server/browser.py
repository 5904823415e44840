"""Headless Chromium, driven over the DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")


class Browser:
    """One page; `errors` are its exceptions, failed loads and refused requests to elsewhere."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._numbers, self._session = socket, itertools.count(1), None
        self.errors: list[str] = []
        self.urls: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv(60))
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"].get("exception", {}).get("description", "exception"))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif event.get("method") == "Network.requestWillBeSent":
            self.urls.append(params["request"]["url"])

    def evaluate(self, script: str) -> Any:
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, script: str, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not self.evaluate(script):
            assert time.monotonic() < deadline, f"never true: {script}\n{self.errors}"
            time.sleep(0.05)

    def open(self, url: str, *, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && document.querySelectorAll('#method option').length > 0")

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int, *, alt: bool = False, shift: bool = False) -> None:
        both = {"key": key, "windowsVirtualKeyCode": code, "modifiers": alt * 1 + shift * 8}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **both, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **both)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextlib.contextmanager
def open_browser(chromium: str, profile: Path) -> Iterator[Browser]:
    command = [chromium, *FLAGS, "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        try:
            found = None
            while found is None:
                line = process.stderr.readline()
                assert line, "chromium did not start"
                found = re.search(r"ws://\S+", line.decode())
            with connect(found.group(), max_size=None) as socket:
                yield Browser(socket)
        finally:
            process.terminate()
