"""What surrounds this kernel: which program shows the notebook, which environment it runs in, and whether its widgets live.

Imports no torch. `environment` turns these facts into advice.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from .stored import hiding_rule, key_of, show

NOT_SHOWN = (
    "Widgets are not showing here. In a page that is only a copy of this notebook that is as it should be; "
    "in a Lab, run this cell again, then see the README under If something goes wrong."
)
WAITING = "A widget is showing, but the kernel has not heard from this page: is the kernel running?"
LIVE = "Widgets are live: this page and the kernel have just exchanged a message."


def shown_by() -> str:
    """The program that shows this notebook: "colab", "kaggle", "vscode", "jupyter", or "terminal" outside any kernel."""
    if "google.colab" in sys.modules or "COLAB_RELEASE_TAG" in os.environ:
        return "colab"
    if "KAGGLE_KERNEL_RUN_TYPE" in os.environ:
        return "kaggle"
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None or not hasattr(shell, "kernel"):
        return "terminal"
    if "__vsc_ipynb_file__" in shell.user_ns:
        return "vscode"
    if any(name.startswith("VSCODE_") for name in os.environ) and server_environment() is None:
        return "vscode"  # with a server it is a Lab that was started from a terminal in VS Code
    return "jupyter"


def server_environment() -> Path | None:
    """The folder of the Python environment that the Jupyter server of this kernel runs in; None if that cannot be told.

    The server is an ancestor of the kernel: on Windows the launcher of a virtual environment stands between the two.
    """
    try:
        import psutil

        for process in psutil.Process().parents()[:4]:
            command = process.cmdline()
            start = " ".join(command[:4]).lower()
            if "ipykernel" not in start and any(word in start for word in ("jupyter", "notebook")):
                return environment_of(command, process.environ(), process.cwd())
    except Exception:  # no psutil, a process that has just ended, or one that we may not look at
        return None
    return None


def environment_of(command: list[str], variables: dict[str, str], folder: str) -> Path | None:
    """The environment of a Python process, from its command line, environment variables and working folder.

    Three traces, the surest first: the launcher that Python on macOS names, the script of that environment, its interpreter.
    """
    traces = [variables.get("__PYVENV_LAUNCHER__", ""), *[part for part in command[1:2] if not part.startswith("-")], command[0]]
    for trace in traces:
        place = Path(folder, trace)  # an absolute trace replaces the folder
        if trace and place.parent.name in ("bin", "Scripts") and place.parent.is_dir():
            return place.parent.parent
        if trace and (place.parent / "conda-meta").is_dir():  # conda on Windows keeps python.exe at the top
            return place.parent
    return None


def widgets_in_lab(environment: Path) -> str | None:
    """The version of the widgets extension that a Lab running in `environment` loads; None where it finds none."""
    places = [environment / "share" / "jupyter", *[Path(p) for p in os.environ.get("JUPYTER_PATH", "").split(os.pathsep) if p]]
    try:
        from jupyter_core.paths import jupyter_data_dir

        places.append(Path(jupyter_data_dir()))
    except ImportError:
        pass
    for place in places:
        package = place / "labextensions" / "@jupyter-widgets" / "jupyterlab-manager" / "package.json"
        if package.is_file():
            return json.loads(package.read_text(encoding="utf-8")).get("version", "of unknown version")
    return None


def display_liveness() -> None:
    """Show a line that says NOT_SHOWN, WAITING or LIVE, whichever is true of the page that shows it, now and when it is stored.

    Nothing blocks: a page that draws the widget sends a message, and the kernel answers it when the cell has ended.
    """
    key = key_of(NOT_SHOWN)
    try:
        line = _answering_line(key)
    except Exception:  # no ipywidgets, or a broken one: the table above says so
        from IPython.display import display

        display({"text/html": _strong("✗", NOT_SHOWN), "text/plain": NOT_SHOWN}, raw=True)
    else:
        show(line, _strong("✗", NOT_SHOWN), NOT_SHOWN, key)


def _answering_line(key: str):
    import ipywidgets

    class Line(ipywidgets.HTML):
        def __repr__(self):
            return "This line turns where a kernel runs."

    line = Line(hiding_rule(key) + _strong("?", WAITING))
    line._view_count = 0  # not None: the page then reports how often it shows this widget

    def answered(change):
        if change.new:
            line.value = hiding_rule(key) + _strong("✓", LIVE)

    line.observe(answered, "_view_count")
    return line


def _strong(symbol: str, text: str) -> str:
    return f"<b>{symbol} {text}</b>"
