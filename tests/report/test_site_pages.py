"""The documentation site, built and opened in a real browser."""

import functools
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, missing_reason

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing_reason() is not None, reason=str(missing_reason())),
]


class Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[str]]]:
    """The address of the site, and its pages."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Silent, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", sorted(str(x.relative_to(folder)) for x in folder.rglob("*.html"))
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("width", [500, 1250])
def test_every_page_fits_the_window_and_fetches_nothing_else(site, tmp_path: Path, width: int) -> None:
    address, pages = site
    assert len(pages) > 30
    browser = Browser(tmp_path / "profile", width, 900)
    try:
        for page in pages:
            browser.go(f"{address}/{page}")
            assert browser.run("return document.documentElement.scrollWidth <= innerWidth"), page
            broken = (
                "return [...document.images].filter((one) => one.complete && !one.naturalWidth).map((one) => one.src)"
            )
            assert browser.run(broken) == [], page
            resources = browser.run("return performance.getEntriesByType('resource').map((one) => one.name)")
            assert [name for name in resources if not name.startswith((address, "data:"))] == [], page
            assert browser.messages() == [], page
            # Where the examples of docstrings are not code, their prompts become nested quotations.
            assert browser.run("return document.querySelectorAll('blockquote').length") == 0, page
            if page in ("api/lln.html", "api/theory.html"):
                texts = browser.run("return [...document.querySelectorAll('pre')].map((one) => one.innerText)")
                assert sum(text.startswith(">>>") for text in texts) > 5, page
    finally:
        browser.close()
