"""The site builds strictly, needs no other host, and fits a screen and a phone. `make test-docs` runs this."""

import functools
import http.server
import os
import subprocess
import sys
import threading

import pytest
from checkout import ROOT

pytestmark = pytest.mark.slow
WIDTHS = {"desktop": 1300, "phone": 390}
# Blocks and tables with cut text: they are wider than their box, and the box does not scroll.
CUT_OFF = """() => [...document.querySelectorAll("article pre > code, article table")].filter(e => {
    const box = e.matches("code") ? e : e.parentElement
    const scrolls = ["auto", "scroll"].includes(getComputedStyle(box).overflowX)
    return box.scrollWidth > box.clientWidth + 1 && !scrolls
}).map(e => e.textContent.slice(0, 80))"""
# Code blocks that a reader would have to scroll, except the output of commands.
SCROLLING = """() => [...document.querySelectorAll("article div:not(.language-text) > pre > code")]
    .filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent.slice(0, 80))"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    path = os.environ.get("BROWSER")
    with sync_api.sync_playwright() as play:
        args = ["--no-sandbox"]  # containers forbid what its sandbox needs
        browser = play.chromium.launch(executable_path=path or None, args=args)
        yield browser
        browser.close()


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_pages_fit_the_screen(address, browser, width, tmp_path):
    """No page is wider than the screen, and no code or table is cut. Pictures go to $PICTURES, or to tmp_path."""
    pictures = os.environ.get("PICTURES", tmp_path)
    tab = browser.new_page(viewport={"width": width, "height": 900})
    requests = []
    tab.on("request", lambda request: requests.append(request.url))
    for page in sorted((ROOT / "docs").glob("*.md")):
        tab.goto(address + ("" if page.stem == "index" else f"{page.stem}/"))
        tab.screenshot(path=f"{pictures}/{page.stem}-{width}.png")
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, page.name
        assert tab.evaluate(CUT_OFF) == [], page.name
        assert tab.evaluate(SCROLLING) == [], f"{page.name}: code that needs scrolling"
    tab.close()
    elsewhere = [url for url in requests if not url.startswith((address, "data:", "blob:"))]
    assert not elsewhere, "the site needs no other host"
