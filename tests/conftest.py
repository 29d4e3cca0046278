"""What all tests share: nothing is left running at the end."""

from __future__ import annotations

import os
import secrets
import time

import pytest

MARK = os.environ["LESSONS_TEST_SESSION"] = secrets.token_hex(8)  # every process that the tests start inherits it
HELPERS = ("lessons_lib.ranks.template", "multiprocessing.forkserver", "multiprocessing.resource_tracker")


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
        reporter.ensure_newline()
        for pid, command in left.items():
            reporter.write_line(f"left running after the tests: {pid} {command[:300]}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def stray_processes() -> dict[int, str]:
    """The processes that carry this session's mark and still run, {pid: command line}, but for helpers.

    Helpers end with this very process: the template that ranks are forked from, and multiprocessing's own. A rank that is
    forked from the template has its command line, but not this process as its parent.
    """
    import psutil

    found = {}
    for process in psutil.process_iter():
        try:
            if process.status() == psutil.STATUS_ZOMBIE or process.environ().get("LESSONS_TEST_SESSION") != MARK:
                continue
            command = " ".join(process.cmdline())
            if process.ppid() != os.getpid() or not any(name in command for name in HELPERS):
                found[process.pid] = command
        except (psutil.Error, OSError):
            pass  # it has just ended, or belongs to somebody else
    return found
