"""The tests' own JupyterLab: it leaves nothing behind, whatever happens inside, and says why it did not start."""

import subprocess
import sys

import pytest
from lab_server import JupyterLab
from pages import wait_until

pytestmark = pytest.mark.browser
STRAY = "import time, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
STARTS_STRAY = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {STRAY!r}], start_new_session=True)"


def test_what_outlives_the_server_is_ended_and_told(tmp_path):
    with JupyterLab(tmp_path, tmp_path) as lab:
        kernel = lab.api("api/kernels", "POST")
        wait_until("the kernel is listed", lambda: [k["id"] for k in lab.api("api/kernels")] == [kernel["id"]])
        subprocess.run([sys.executable, "-c", STARTS_STRAY], env={"LESSONS_BROWSER_TEST": lab.mark}, check=True)
        wait_until("server, kernel and stray run", lambda: len(lab.marked_processes()) >= 3)
    assert len(lab.left_over) == 1 and "sleep(600)" in lab.left_over[0]
    assert lab.marked_processes() == []


def test_a_server_that_cannot_start_says_why(tmp_path):
    lab = JupyterLab(tmp_path, tmp_path)
    lab.folder = tmp_path / "gone"  # where the server would serve from
    with pytest.raises(RuntimeError, match="(?s)did not start.*gone"):
        lab.__enter__()
    assert lab.marked_processes() == []
