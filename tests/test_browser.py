"""The site in a browser: no box of any page scrolls sideways, on a screen and on a phone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WIDTHS = (1280, 400)  # pixels
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the path"),
    pytest.mark.skipif(find_spec("mkdocs") is None, reason="the extra docs is not installed; `make docs` installs it"),
]

# The boxes whose content is wider than they are, where that does not simply flow over them.
WIDE = """[document.documentElement, ...document.querySelectorAll("article, article *")]
  .filter((x) => x.clientWidth > 0 && x.scrollWidth > x.clientWidth + 1)
  .filter((x) => x === document.documentElement || getComputedStyle(x).overflowX !== "visible")
  .map((x) => `${x.tagName} ${x.scrollWidth} > ${x.clientWidth}: ${x.textContent.trim().slice(0, 80)}`)"""


class Browser:
    """A Chromium that is told over a pipe what to do: JSON of the DevTools protocol, each message ended by a NUL."""

    def __init__(self, profile: Path):
        told, self._tell = os.pipe()
        self._hear, said = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-zygote", f"--user-data-dir={profile}"]
        # Chromium reads from file 3 and writes to file 4.
        shell = ["bash", "-c", f'exec "$@" 3<&{told} 4>&{said}', "bash"]
        command = [*shell, CHROMIUM, *flags, "--remote-debugging-pipe", "about:blank"]
        self._process = subprocess.Popen(command, pass_fds=(told, said), stderr=subprocess.DEVNULL)
        os.close(told)
        os.close(said)
        self._heard, self._sent = b"", 0
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable", self._session)

    def _message(self) -> dict:
        while b"\0" not in self._heard:
            more = os.read(self._hear, 1 << 16)
            if not more:
                raise EOFError("the browser has ended")
            self._heard += more
        message, _, self._heard = self._heard.partition(b"\0")
        return json.loads(message)

    def call(self, method: str, session: str | None = None, until: str | None = None, **params) -> dict:
        """Return the result of a command, or what the event says that ``until`` names."""
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._tell, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._sent and "error" in answer:
                raise RuntimeError(answer["error"]["message"])
            if (answer.get("method") == until) if until else (answer.get("id") == self._sent):
                return answer.get("params" if until else "result")

    def show(self, page: Path, width: int) -> None:
        """Open a page in a window of this width, and wait until it has loaded."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", self._session, **size)
        self.call("Page.navigate", self._session, until="Page.loadEventFired", url=page.as_uri())

    def value(self, expression: str):
        """Return the value of a JavaScript expression in the page."""
        said = self.call("Runtime.evaluate", self._session, expression=expression, returnByValue=True)
        return said["result"]["value"]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._tell)
        os.close(self._hear)


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run(build, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True)
    return folder


@pytest.mark.parametrize("width", WIDTHS)
def test_no_box_of_any_page_scrolls_sideways(browser, site, width):
    wide = {}
    for page in sorted(site.rglob("*.html")):
        browser.show(page, width)
        assert "tilewise" in browser.value("document.title")
        wide[page.relative_to(site).as_posix()] = browser.value(WIDE)
    assert {"index.html", "docs/performance.html", "docs/switching.html"} < set(wide)
    assert {page: boxes for page, boxes in wide.items() if boxes} == {}


def test_a_box_that_scrolls_sideways_is_found(browser, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("<!doctype html><article><pre style='overflow: auto; width: 80px'>longer than the box</article>")
    browser.show(page, 400)
    assert [said.split()[0] for said in browser.value(WIDE)] == ["PRE"]
