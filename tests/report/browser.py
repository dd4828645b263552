"""A headless Chromium by the WebDriver protocol of chromedriver: JSON over HTTP, so no package is needed."""

import base64
import json
import shutil
import subprocess
import time
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element in the protocol
KEYS = {"Enter": "\ue007", "Escape": "\ue00c", "ArrowRight": "\ue014", "ArrowDown": "\ue015", "Tab": "\ue004"}


def missing_reason() -> str | None:
    """Why there is no browser to test with; None if there is one."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None or shutil.which("chromedriver") is None:
        return "chromium and chromedriver are not installed"
    return None


class Browser:
    """One window. Close it when done."""

    def __init__(self, profile: Any, width: int, height: int) -> None:
        self._process = subprocess.Popen(
            ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        port = next(
            line.rstrip(".\n").rpartition(" ")[2] for line in self._process.stdout if "successfully on port" in line
        )
        self._open = build_opener(ProxyHandler({})).open  # no proxy of the environment is for this machine
        self._root = f"http://127.0.0.1:{port}/session"
        arguments = [*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"]
        binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"binary": binary, "args": arguments},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        try:
            session = self._call("POST", "", {"capabilities": {"alwaysMatch": wanted}})
        except BaseException:
            self._end()
            raise
        self._root += f"/{session['sessionId']}"

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self._root + path, data, {"Content-Type": "application/json"}, method=method)
        for _ in range(50):
            try:
                with self._open(request, timeout=120) as answer:
                    return json.load(answer)["value"]
            except HTTPError as error:
                raise AssertionError(error.read().decode()) from error
            except URLError:  # the driver is not listening yet
                time.sleep(0.1)
        raise AssertionError("chromedriver does not answer")

    def _end(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=30)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def go(self, url: str) -> None:
        self._call("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that JavaScript returns."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def click(self, selector: str) -> None:
        found = self._call("POST", "/element", {"using": "css selector", "value": selector})
        self._call("POST", f"/element/{found[ELEMENT]}/click", {})

    def press(self, key: str) -> None:
        actions = [{"type": kind, "value": KEYS[key]} for kind in ("keyDown", "keyUp")]
        self._call("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def color_scheme(self, name: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": name}]
        command = {"cmd": "Emulation.setEmulatedMedia", "params": {"features": features}}
        self._call("POST", "/goog/cdp/execute", command)

    def messages(self) -> list[str]:
        """What was written to the console."""
        return [entry["message"] for entry in self._call("POST", "/se/log", {"type": "browser"})]

    def picture(self) -> bytes:
        return base64.b64decode(self._call("GET", "/screenshot"))

    def close(self) -> None:
        try:
            self._call("DELETE", "")
        finally:
            self._end()
