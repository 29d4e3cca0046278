"""What all tests share: the browser's rule, and nothing left running at the end."""

from __future__ import annotations

import os
import shutil
import time

import pytest

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
IN_CI = os.environ.get("CI", "").lower() not in ("", "0", "false")


def find_chromium() -> str | None:
    """A browser of the Chromium family: the one that LESSONS_CHROMIUM names, else the first on the PATH."""
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


def descendants() -> dict[int, str]:
    """The processes that this one has started, directly or not, and that still run: {pid: command line}."""
    import psutil

    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = " ".join(process.cmdline())
        except psutil.Error:
            pass  # it has just ended
    return found


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    """A rank, kernel or browser that outlives the tests is a failure of its own, whatever the tests say."""
    if session.config.getoption("collectonly", False):
        return
    deadline = time.monotonic() + 5  # those that are ending may take their two seconds
    while (left := stray_processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    if left:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        for pid, command in left.items():
            reporter.write_line(f"left running after the tests: {pid} {command[:300]}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def stray_processes() -> dict[int, str]:
    """Descendants but for those that serve this very process until it ends: the template that ranks are forked from, trackers."""
    helpers = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
    return {pid: command for pid, command in descendants().items() if not any(name in command for name in helpers)}
