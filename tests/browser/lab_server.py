"""A real JupyterLab on a free port, in a folder of its own, and nothing of it left afterwards.

    with JupyterLab(folder) as lab:
        lab.page_url("lesson.ipynb")

The server, its kernels and their ranks carry a mark in their environment: whatever still has it at the end is ended, and told.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from urllib.parse import quote

import psutil

ROOT = Path(__file__).resolve().parents[2]
MARK = "LESSONS_BROWSER_TEST"
START_SECONDS = 90  # the first start on a cold disk


class JupyterLab:
    """Serves `folder`; `log` holds what the server printed. `left_over` names the processes that outlived its shutdown."""

    def __init__(self, folder: Path, scratch: Path):
        self.folder, self.scratch = Path(folder), Path(scratch)
        self.log = self.scratch / "server.log"
        self.token, self.mark = secrets.token_hex(16), secrets.token_hex(8)
        self.left_over: list[str] = []

    def __enter__(self) -> JupyterLab:
        state = {name: str(self.scratch / name.lower()) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR")}
        runtime = self.scratch / "runtime"
        quiet = Path(state["JUPYTER_CONFIG_DIR"], "lab", "user-settings", "@jupyterlab", "apputils-extension")
        quiet.mkdir(parents=True)  # no question about news lies over the page
        (quiet / "notification.jupyterlab-settings").write_text('{"fetchNews": "false", "checkForUpdates": false}')
        environment = {
            **os.environ,
            **state,
            "JUPYTER_RUNTIME_DIR": str(runtime),
            "JUPYTER_PREFER_ENV_PATH": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            MARK: self.mark,
        }
        options = ["--no-browser", "--ServerApp.ip=127.0.0.1", "--ServerApp.port=0", "--allow-root"]
        options += [f"--IdentityProvider.token={self.token}", f"--ServerApp.root_dir={self.folder}"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jupyterlab", *options],
                env=environment, cwd=self.scratch, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        try:
            self.url = self._wait_for_url(runtime)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait_for_url(self, runtime: Path) -> str:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            for file in runtime.glob("jpserver-*.json"):
                try:
                    return json.loads(file.read_text())["url"]
                except (OSError, json.JSONDecodeError):
                    pass  # being written just now
            time.sleep(0.1)
        raise RuntimeError(f"JupyterLab did not start in {START_SECONDS} s; it said: {self.tail()}")

    def page_url(self, notebook: str) -> str:
        """The address that opens `notebook` (a path within the folder) in a fresh workspace."""
        return f"{self.url}lab/tree/{quote(notebook)}?reset&token={self.token}"

    def api(self, path: str, method: str = "GET"):
        """The server's answer to a call of its REST interface."""
        call = urllib.request.Request(self.url + path, method=method, headers={"Authorization": f"token {self.token}"})
        with urllib.request.urlopen(call, timeout=30) as answer:
            return json.loads(answer.read() or b"null")

    def marked_processes(self) -> list[psutil.Process]:
        """Every process that this server started, directly or not, and that still runs."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark:
                    found.append(process)
            except (psutil.Error, OSError):
                pass  # it has just ended, or belongs to somebody else
        return found

    def __exit__(self, *_) -> None:
        try:
            self.api("api/shutdown", "POST")
        except Exception:
            self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        deadline = time.monotonic() + 5  # ranks may take two seconds to notice that their kernel is gone
        while (left := self.marked_processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        self.left_over = [_describe(process) for process in left]
        for process in left:
            try:
                process.kill()
            except psutil.Error:
                pass
        psutil.wait_procs(left, timeout=5)  # killed is not yet gone

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid}: {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return f"{process.pid}"
