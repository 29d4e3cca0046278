"""What surrounds this kernel: which program shows the notebook, which environment it runs in, and whether its widgets live.

Imports nothing of ours and no torch; `environment` turns these facts into advice.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

NOT_SHOWN = "Widgets are not showing: the page that you read this in cannot show them."
NO_ANSWER = "Widgets: no answer from a live kernel. In a page that is only a copy this stays so; in a Lab, run this cell again."
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
    """Show a line that starts as NO_ANSWER and turns to LIVE when the page answers; where no widget can be shown, NOT_SHOWN.

    Nothing blocks: a page that draws the line sends a message, and the kernel answers it when the cell has ended.
    """
    from IPython.display import display

    try:
        bundle = _answering_line()._repr_mimebundle_()
    except Exception as error:
        bundle = {"text/plain": f"{NOT_SHOWN} ({type(error).__name__}: {error})"}
    else:
        bundle = {**bundle, "text/plain": NOT_SHOWN, "text/html": f"<p><b>✗ {NOT_SHOWN}</b></p>"}
    display(bundle, raw=True)


def _answering_line():
    import ipywidgets

    line = ipywidgets.HTML(f"<b>? {NO_ANSWER}</b>")
    line._view_count = 0  # not None: the page then reports how often it shows this widget

    def answered(change):
        if change.new:
            line.value = f"<b>✓ {LIVE}</b>"

    line.observe(answered, "_view_count")
    return line
