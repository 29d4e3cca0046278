"""The environment check: the first cell of the course. It says what this machine offers and what to do where something is missing.

    from lessons_lib import check_environment
    check_environment()

Imports torch only inside one check, so that it runs, and says so, where torch is not installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import platform
import re
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from importlib import metadata
from pathlib import Path

from . import lab

OK, WARNING, PROBLEM = "OK", "warning", "problem"
SYMBOL = {OK: "✓", WARNING: "!", PROBLEM: "✗"}
PYTHON = ((3, 10), (3, 13))  # first and last release that the tests ran on
TORCH = (2, 13)
IPYWIDGETS, EXTENSION = (
    8,
    5,
)  # generations that belong together: in the kernel, and in the Lab (Python package jupyterlab_widgets 3)
PACKAGES = ("numpy", "matplotlib", "cloudpickle", "psutil")
RANKS = 4  # most lessons run four
LEAST_MEMORY = 1.5e9  # bytes: four ranks that are spawned and share nothing, and the kernel
INSTALL = "in the course's folder, run `make lab`, or `python -m pip install -r requirements.txt` with the kernel's own Python"


@dataclass(frozen=True)
class Check:
    """One line of the table: what was looked at, how it stands, what was found, and what to do (empty when all is well)."""

    name: str
    state: str
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Environment:
    """What `check_environment` returns: shows itself as a table in a notebook, prints as text elsewhere."""

    checks: tuple[Check, ...]

    @property
    def ready(self) -> bool:
        """Whether the lessons can run: no check found a problem (warnings are allowed)."""
        return all(check.state != PROBLEM for check in self.checks)

    @property
    def verdict(self) -> str:
        counts = [(sum(check.state == state for check in self.checks), state) for state in (PROBLEM, WARNING)]
        said = " and ".join(f"{n} {state}{'s' if n > 1 else ''}" for n, state in counts if n)
        if not self.ready:
            return f"Not ready yet: {said}. Do what stands beside each, restart the kernel, and run this cell again."
        return f"Ready, with {said}: the lessons run, but read what stands beside it." if said else "Ready: everything is in place."

    def __repr__(self) -> str:
        width = max((len(check.name) for check in self.checks), default=0)
        lines = []
        for check in self.checks:
            lines.append(f"{SYMBOL[check.state]} {check.state:<7}  {check.name:<{width}}  {check.found}")
            if check.advice:
                lines.append(f"{'':<11}{'':<{width}}  What to do: {check.advice}")
        return "\n".join([*lines, self.verdict])

    def _repr_html_(self) -> str:
        left = "style='text-align:left'"
        rows = ""
        for check in self.checks:
            advice = f"<br><b>What to do:</b> {escape(check.advice)}" if check.advice else ""
            rows += (
                f"<tr><td {left}>{SYMBOL[check.state]}&nbsp;{check.state}</td><td {left}>{escape(check.name)}</td>"
                f"<td {left}>{escape(check.found)}{advice}</td></tr>"
            )
        head = f"<tr><th {left}>State</th><th {left}>What</th><th {left}>Found</th></tr>"
        return f"<table><thead>{head}</thead><tbody>{rows}</tbody></table><p><b>{escape(self.verdict)}</b></p>"

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display({"text/html": self._repr_html_(), "text/plain": repr(self)}, raw=True)
        if lab.shown_by() != "terminal":
            lab.display_liveness()


def check_environment() -> Environment:
    """Look at Python, PyTorch and other packages, the kernel and its Lab, widgets, cores, memory, loopback and temporary folder.

    Takes as long as importing torch. Never raises: a look that fails in a way nobody foresaw becomes a warning.
    """
    looks = {
        "Python": check_python,
        "PyTorch": check_torch,
        "Other packages": check_packages,
        "The course": check_course,
        "Kernel and Lab": check_kernel,
        "Widgets": check_widgets,
        "Processor cores": check_cores,
        "Free memory": check_memory,
        "Loopback": check_loopback,
        "Temporary folder": check_temporary_folder,
    }
    return Environment(tuple(_guarded(name, look) for name, look in looks.items()))


def _guarded(name: str, look: Callable[[], Check]) -> Check:
    try:
        return look()
    except Exception as error:
        return Check(name, WARNING, f"could not be told: {type(error).__name__}: {error}", "go on; come back if a lesson fails")


def check_python() -> Check:
    first, last = (".".join(map(str, version)) for version in PYTHON)
    found = f"Python {platform.python_version()} on {platform.system() or 'an unknown system'}"
    if sys.version_info[:2] < PYTHON[0]:
        advice = f"the course needs Python {first} to {last}: install one and run `make lab PYTHON=python{last}`"
        return Check("Python", PROBLEM, found, advice)
    if sys.version_info[:2] > PYTHON[1]:
        return Check("Python", WARNING, found, f"the course is tested with {first} to {last}: if a lesson fails, use one of these")
    return Check("Python", OK, found)


def check_torch() -> Check:
    try:
        torch = importlib.import_module("torch")
    except ModuleNotFoundError:
        return Check("PyTorch", PROBLEM, "not installed in this kernel's environment", f"{INSTALL}, then restart the kernel")
    except Exception as error:  # a broken install fails while loading its libraries, with errors of many kinds
        windows = " (on Windows, install Microsoft's Visual C++ Redistributable first)" if os.name == "nt" else ""
        advice = f"install it again{windows}: {INSTALL}"
        return Check("PyTorch", PROBLEM, f"installed, but importing it fails: {type(error).__name__}: {error}", advice)
    version, wanted = str(torch.__version__), ".".join(map(str, TORCH))
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        advice = "this build cannot run ranks: install an official one from PyTorch's Get Started page"
        return Check("PyTorch", PROBLEM, f"PyTorch {version} without torch.distributed and gloo", advice)
    if not numbers or tuple(map(int, numbers.groups())) != TORCH:
        advice = f"the course is tested with {wanted}: if a lesson fails, {INSTALL}"
        return Check("PyTorch", WARNING, f"PyTorch {version}", advice)
    return Check("PyTorch", OK, f"PyTorch {version} with gloo")


def check_packages() -> Check:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        found = f"not installed in this kernel's environment: {', '.join(missing)}"
        return Check("Other packages", PROBLEM, found, f"{INSTALL}, then restart the kernel")
    return Check("Other packages", OK, ", ".join(PACKAGES))


def check_course() -> Check:
    """Whether every lesson finds `lessons_lib`, or only this one, by a path of its own that is relative to its folder."""
    places = [Path(entry) for entry in sys.path if entry and Path(entry).is_absolute()]
    if _installed("parallelism-by-hand") or any((place / "lessons_lib" / "__init__.py").is_file() for place in places):
        return Check("The course", OK, "installed in this kernel's environment")
    advice = f"{INSTALL}; or begin every lesson as this one, with sys.path.append"
    return Check("The course", WARNING, "found beside this notebook, but not installed in the kernel's environment", advice)


def _installed(project: str) -> bool:
    try:
        return bool(metadata.version(project))
    except metadata.PackageNotFoundError:
        return False


def check_kernel() -> Check:
    """Whether the kernel and the Lab that shows it are in one environment: widgets need matching packages on both sides."""
    name, where = "Kernel and Lab", lab.shown_by()
    if where == "terminal":
        return Check(name, OK, "not in a notebook: there is no Lab to agree with")
    if where != "jupyter":
        program = {"vscode": "VS Code", "colab": "Colab", "kaggle": "Kaggle"}[where]
        return Check(name, OK, f"{program} shows this notebook and brings its own widgets")
    server, kernel = lab.server_environment(), Path(sys.prefix)
    if server is None:
        return Check(name, OK, "the Lab's environment cannot be told from here; the line on widgets below decides")
    if os.path.realpath(server) == os.path.realpath(kernel):
        return Check(name, OK, "one environment")
    return Check(
        name,
        WARNING if lab.widgets_in_lab(server) else PROBLEM,
        f"two environments: the kernel runs in {kernel}, the Lab in {server}",
        "stop this Lab and start it with `make lab`, or with `python -m jupyterlab` of the environment that has the course; "
        "then choose Kernel > Change Kernel... > Python 3 (ipykernel)",
    )


def check_widgets() -> Check:
    try:
        version = str(importlib.import_module("ipywidgets").__version__)
    except Exception as error:
        found = f"ipywidgets cannot be imported: {type(error).__name__}: {error}"
        return Check("Widgets", PROBLEM, found, f"{INSTALL}, then restart the kernel")
    if int(version.split(".")[0]) != IPYWIDGETS:
        return Check("Widgets", PROBLEM, f"ipywidgets {version}", f"the course needs ipywidgets {IPYWIDGETS}: {INSTALL}")
    server = lab.server_environment() if lab.shown_by() == "jupyter" else None
    extension = lab.widgets_in_lab(server) if server else None
    if server and not extension:
        advice = f"run `python -m pip install jupyterlab_widgets` with the Python of {server}, stop the Lab and start it again"
        return Check("Widgets", PROBLEM, f"ipywidgets {version}, but the Lab has no widgets extension", advice)
    if extension and not extension.startswith(f"{EXTENSION}."):
        advice = "stop the Lab, run `python -m pip install -U jupyterlab_widgets` in its environment, and start it again"
        return Check("Widgets", PROBLEM, f"ipywidgets {version}, but the Lab's extension is {extension}", advice)
    return Check("Widgets", OK, f"ipywidgets {version}" + (f"; the Lab's extension is {extension}" if extension else ""))


def usable_cores() -> int:
    """Cores that this process may use: fewer than the machine's where a container or batch system says so."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_cores() -> Check:
    cores = usable_cores()
    if cores < 2:
        advice = "everything runs, but ranks take turns: measured times say little here, replayed ones stay exact"
        return Check("Processor cores", WARNING, "1 core", advice)
    return Check("Processor cores", OK, f"{cores} cores")


def free_memory() -> float:
    """Bytes that new processes may take: the machine's, or what the container leaves where that is less."""
    import psutil

    free = float(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return free if limit == "max" else min(free, float(limit) - float(used))
    except (OSError, ValueError):
        return free


def check_memory() -> Check:
    free = free_memory()
    if free < LEAST_MEMORY:
        advice = (
            f"{RANKS} ranks may need up to {LEAST_MEMORY / 1e9:.1f} GB: close other programs and kernels (Kernel > Shut Down All)"
        )
        return Check("Free memory", WARNING, f"{free / 1e9:.1f} GB", advice)
    whole = 2 ** int(math.log2(free / 1e9))  # a power of two: the same each time that the cell runs
    return Check("Free memory", OK, f"{whole} GB or more")


def check_loopback() -> Check:
    """Two sockets of this process exchange a byte over 127.0.0.1, which is how ranks talk to each other."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(5)
            with socket.create_connection(server.getsockname(), timeout=5) as here:
                there, _ = server.accept()
                with there:
                    here.sendall(b"x")
                    there.settimeout(5)
                    if there.recv(1) != b"x":
                        raise OSError("a byte was lost")
    except OSError as error:
        advice = "ranks talk over 127.0.0.1: allow Python to use it in the firewall, virus scanner or VPN, or switch those off"
        return Check("Loopback", PROBLEM, f"a message to this machine itself failed: {error}", advice)
    return Check("Loopback", OK, "a message to this machine itself arrived")


def check_temporary_folder() -> Check:
    name = "Temporary folder"
    try:
        with tempfile.TemporaryFile() as file:
            file.write(b"x" * 4096)
            file.flush()
    except OSError as error:
        advice = "ranks meet through a file there: free some space, or set the variable TMPDIR to a folder you may write to"
        return Check(name, PROBLEM, f"cannot be written: {error}", f"{advice}, and start the Lab again")
    return Check(name, OK, "can be written")
