"""Pages in a real browser: what it complains of, which text cannot be read, and a picture to look at.

Chromium is driven over its DevTools protocol; it runs without a network and with a profile of its own.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import websocket

DEADLINE = 60.0
# Each text of the page, line by line: where it is, how well it stands off its ground, whether something cuts it.
_TEXTS = """(() => {
  const rgb = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => { const f = c => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    return 0.2126 * f(r) + 0.7152 * f(g) + 0.0722 * f(b); };
  const ground = e => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor);
    if (c.length === 3 || c[3] > 0.5) return c.slice(0, 3); } return [255, 255, 255]; };
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; node = walk.nextNode();) {
    const text = node.textContent.trim(), owner = node.parentElement;
    if (!text || owner.closest('title, script, style, template')) continue;
    const style = getComputedStyle(owner), svg = owner.closest('svg');
    if (style.visibility !== 'visible' || owner.checkVisibility && !owner.checkVisibility()) continue;
    const range = document.createRange(); range.selectNodeContents(node);
    const ink = rgb(svg ? style.fill : style.color), a = light(ink), b = light(ground(svg || owner));
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const scrolls = owner.closest('.scroll') !== null;
    const frame = svg ? svg.getBoundingClientRect() : null;
    for (const r of range.getClientRects()) if (r.width > 1) found.push({text, contrast, scrolls, svg: !!svg,
      box: [r.left + scrollX, r.top + scrollY, r.right + scrollX, r.bottom + scrollY],
      cut: frame !== null && (r.left < frame.left - 1 || r.right > frame.right + 1
        || r.top < frame.top - 1 || r.bottom > frame.bottom + 1)});
  }
  return found;
})()"""


class Page:
    """One page that is open, in one tab of its own."""

    def __init__(self, address: str) -> None:
        self._socket = websocket.create_connection(address, timeout=DEADLINE, suppress_origin=True)
        self._number = 0
        self._events: list[dict[str, Any]] = []
        self.complaints: list[str] = []
        """Errors and warnings of the console, exceptions, refusals of the content policy, loads that failed."""
        self.asked: list[str] = []
        """Addresses that it has loaded from, or tried to."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, url: str, *, width: int = 1100, height: int = 900, dark: bool = False) -> None:
        """Load `url` and wait until it has loaded all that it asks for, fonts too."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self._events.clear()
        gone = self.call("Page.navigate", url=url).get("errorText")
        assert not gone, f"{url}: {gone}"
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._take(json.loads(self._socket.recv()))
        self.evaluate("document.fonts.ready.then(() => new Promise(requestAnimationFrame)).then(() => true)")

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page, or of its promise."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def texts(self) -> list[dict[str, Any]]:
        """Every line of text that is shown: `text`, `box` (left, top, right, bottom), `contrast` to its ground as
        WCAG counts it, `svg`, `cut` (it leaves its picture), `scrolls` (it may lie outside the page)."""
        found: list[dict[str, Any]] = self.evaluate(_TEXTS)
        return found

    def width_beyond(self) -> float:
        """Pixels that the page is wider than its window."""
        return float(
            self.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        )

    def screenshot(self, path: Path) -> bytes:
        """The whole page, below the window's lower edge too, as PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path.read_bytes()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One request of the protocol; what happens meanwhile is kept."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                result: dict[str, Any] = message["result"]
                return result
            self._take(message)

    def _take(self, event: dict[str, Any]) -> None:
        self._events.append(event)
        params, method = event.get("params", {}), event.get("method", "")
        if method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(" ".join(str(arg.get("value")) for arg in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.loadingFailed":
            self.complaints.append(f"not loaded: {params['errorText']}")
        elif method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])

    def close(self) -> None:
        """Of the connection; the browser ends with its context."""
        self._socket.close()


def overlaps(texts: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Pairs of texts of which one lies on the other."""
    found = []
    ordered = sorted(texts, key=lambda text: text["box"][1])
    for i, one in enumerate(ordered):
        left, _, right, bottom = one["box"]
        for other in ordered[i + 1 :]:
            if other["box"][1] >= bottom - 2:
                break
            if other["box"][0] < right - 1 and left < other["box"][2] - 1:
                found.append((one["text"], other["text"]))
    return found


@contextmanager
def browser() -> Iterator[Page]:
    """A page of a browser that is started for it and ended after it."""
    program = shutil.which("chromium")
    assert program, "chromium is not installed: `make setup` installs what hack/packages.txt names"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        words = [
            program,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
        ]
        words += ["--disable-background-networking", "--disable-component-update", "--hide-scrollbars"]
        words += [f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"]
        with (Path(profile) / "log").open("wb") as log:
            process = subprocess.Popen(words, stdout=log, stderr=log)
        try:
            page = Page(_address(process, Path(profile)))
            try:
                yield page
            finally:
                page.close()
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(process: subprocess.Popen[bytes], profile: Path) -> str:
    """Of the first tab, once the browser has written the port that it has taken."""
    import urllib.request

    told, end = profile / "DevToolsActivePort", time.monotonic() + DEADLINE
    while time.monotonic() < end and process.poll() is None:
        lines = told.read_text().splitlines() if told.exists() else []
        if len(lines) == 2:
            with urllib.request.urlopen(f"http://127.0.0.1:{lines[0]}/json/list", timeout=DEADLINE) as answer:
                tabs = json.load(answer)
            if address := next((tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page"), None):
                return str(address)
        time.sleep(0.05)
    raise AssertionError(f"chromium gave no tab: {(profile / 'log').read_text(errors='replace')[-2000:]}")
