"""A JupyterLab and a browser for each file of browser tests, and a picture of the page where one fails."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, os.path.dirname(__file__))  # for lab_server and pages
from lab_server import ROOT, JupyterLab  # noqa: E402
from pages import NotebookPage  # noqa: E402

# --no-sandbox: in a container, as root. The rest keeps Chromium from calling home, which a closed network refuses.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip
SCREENSHOTS = Path(tempfile.gettempdir()) / "lessons_browser_failures"
CHROMIUM = (
    *("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge"),
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    r"C:\Program Files\Google\Chrome\Application\chrome.exe",
    r"C:\Program Files (x86)\Microsoft\Edge\Application\msedge.exe",
)
IN_CI = os.environ.get("CI", "").lower() not in ("", "0", "false")


def find_chromium() -> str | None:
    """A browser of the Chromium family: the one that LESSONS_CHROMIUM names, else the first that is found."""
    return os.environ.get("LESSONS_CHROMIUM") or next(filter(None, map(shutil.which, CHROMIUM)), None)


def missing_for_browser_tests() -> str | None:
    """What keeps the browser tests from running here, with what to do; None when they can run."""
    try:
        import playwright  # noqa: F401
    except ImportError:
        return 'Playwright is not installed: python -m pip install -e ".[test]"'
    if not find_chromium():
        return "no Chromium found: install one (Debian: apt install chromium), or set LESSONS_CHROMIUM to a Chrome or Edge"
    return None


def pytest_collection_modifyitems(items):
    """Browser tests are skipped where they cannot run, but in CI they fail: a skipped test proves nothing."""
    reason = missing_for_browser_tests()
    if reason and not IN_CI:
        for item in items:
            if item.get_closest_marker("browser"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    page = getattr(item, "funcargs", {}).get("page")
    if report.when == "call" and report.failed and page is not None:
        SCREENSHOTS.mkdir(exist_ok=True)
        path = SCREENSHOTS / f"{item.name.replace('/', '_').replace(' ', '_')}.png"
        try:
            page.screenshot(path=path)
            report.sections.append(("the page when it failed", f"{path}\n{page.url.split('?')[0]}"))
        except Exception as error:
            report.sections.append(("no picture of the page", repr(error)))


@pytest.fixture(scope="module")
def browser():
    reason = missing_for_browser_tests()
    if reason:
        pytest.fail(f"browser tests must run in CI: {reason}")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A JupyterLab that serves copies of the lessons. Fails at the end if a process outlives it."""
    scratch = tmp_path_factory.mktemp("lab")
    folder = scratch / "my lessons, größer"
    shutil.copytree(ROOT / "notebooks", folder, ignore=shutil.ignore_patterns(".ipynb_checkpoints", "__pycache__", "conftest.py"))
    with JupyterLab(folder, scratch) as lab:
        yield lab
    assert lab.left_over == [], "processes outlived the Lab that started them"


@pytest.fixture
def page(browser):
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(30_000)
    page = context.new_page()
    yield page
    context.close()


@pytest.fixture
def open_notebook(page, lab):
    """open_notebook(name) opens a notebook of the folder in the page; open_notebook(name, cells) writes it first."""

    def open_notebook(name: str, cells: list[str] | None = None) -> NotebookPage:
        if cells is not None:
            import nbformat

            made = [nbformat.v4.new_code_cell(source) for source in cells]
            metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}}
            nbformat.write(nbformat.v4.new_notebook(cells=made, metadata=metadata), lab.folder / name)
        return NotebookPage(page, lab, name)

    yield open_notebook
    for session in lab.api("api/sessions"):  # the next test gets a kernel of its own
        lab.api(f"api/sessions/{session['id']}", "DELETE")
