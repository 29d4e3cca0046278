"""Run notebooks and store what they print, so that two runs store the same file.

    python tests/store_outputs.py                       all lessons
    python tests/store_outputs.py notebooks/00_*.ipynb  some

Each runs from top to bottom in a fresh kernel of this very Python. Widgets are stored without their state: a page without a
kernel then shows the static picture that lessons_lib.stored displays beside each, and no slider that would not move.
What differs from run to run is made the same: names of widgets, places of files, versions and times in the metadata.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import ipykernel.kernelspec
import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).resolve().parents[1]
CELL_SECONDS = 120
KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
LANGUAGE = {"name": "python", "file_extension": ".py", "mimetype": "text/x-python", "pygments_lexer": "ipython3"}
KEPT_CELL_METADATA = ("tags", "reason", "jupyter", "nbgrader")
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


def kernel_environment() -> dict[str, str]:
    """The variables of a kernel whose output is stored or compared: this course, and what ranks print in rank order."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    order = {"LESSONS_HOLD_SECONDS": "60"}  # lines wait so long for those of lower ranks
    return {**os.environ, "PYTHONPATH": path, **order, "LESSONS_PROGRESS": ""}  # progress in exercises: in memory


class ThisPython(KernelSpecManager):
    """Every name means a kernel of the Python that runs this script."""

    def get_kernel_spec(self, kernel_name):
        return self.kernel_spec_class(resource_dir=ipykernel.kernelspec.RESOURCES, **ipykernel.kernelspec.get_kernel_dict())


class Kernel(AsyncKernelManager):
    def _kernel_spec_manager_default(self):
        return ThisPython(parent=self)


def execute(notebook, folder: Path):
    """Run every cell in a fresh kernel whose working folder is `folder`; the outputs land in `notebook`."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        notebook, kernel_manager_class=Kernel, kernel_name="python3", timeout=CELL_SECONDS,
        record_timing=False, store_widget_state=False, coalesce_streams=True, resources={"metadata": {"path": str(folder)}},
    )  # fmt: skip
    client.execute(env=kernel_environment(), cwd=str(folder), stderr=subprocess.DEVNULL)
    return notebook


def normalise(notebook):
    """Make everything the same that differs from run to run and means nothing to a reader. Changes and returns `notebook`."""
    notebook.metadata = nbformat.from_dict({"kernelspec": dict(KERNELSPEC), "language_info": dict(LANGUAGE)})
    for index, cell in enumerate(notebook.cells):
        cell.metadata = nbformat.from_dict({k: v for k, v in cell.metadata.items() if k in KEPT_CELL_METADATA and v})
        if not cell.get("id"):
            cell["id"] = f"cell-{index:02d}"
        if cell.cell_type == "code":
            cell.outputs = [_without_places(output) for output in cell.outputs]
    return rename_widgets(notebook)


def _without_places(output):
    """Tracebacks name files by the place where this machine keeps them; a reader needs the part within the course or package."""
    if output.output_type == "error":
        output.traceback = [without_places(line) for line in output.traceback]
    return output


def without_places(text: str) -> str:
    """`text` with the folders of this machine cut off: the course's, its packages', the standard library's, temporary cells'."""
    for folder in (str(ROOT), re.escape(str(ROOT))):
        text = text.replace(folder + os.sep, "")
    text = re.sub(r"[^\s\"'(]*[/\\](?:site|dist)-packages[/\\]", "", text)
    text = re.sub(r"[^\s\"'(]*[/\\]lib[/\\]python3\.\d+[/\\]", "", text)
    return re.sub(r"[^\s\"'(]*[/\\]ipykernel_\d+[/\\]\d+\.py", "<cell>", text)


def rename_widgets(notebook):
    """Give the widgets in outputs names that depend on their order alone (they are random otherwise)."""
    views = [
        output.data[WIDGET_VIEW]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if WIDGET_VIEW in output.get("data", {})
    ]
    for number, view in enumerate(views):
        view["model_id"] = hashlib.md5(f"widget {number}".encode()).hexdigest()
    return notebook


def store(path: Path) -> bool:
    """Run one notebook and write it back; whether the file changed."""
    before = path.read_text(encoding="utf-8")
    notebook = normalise(execute(nbformat.reads(before, as_version=4), path.parent))
    nbformat.validate(notebook)
    after = nbformat.writes(notebook) + "\n"
    if after != before:
        path.write_text(after, encoding="utf-8", newline="\n")
    return after != before


def main() -> None:
    sys.stdout.reconfigure(encoding="utf-8")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all in notebooks/ and solutions/")
    everything = [path for folder in ("notebooks", "solutions") for path in sorted((ROOT / folder).glob("*.ipynb"))]
    chosen = parser.parse_args().notebooks or everything
    for path in chosen:
        print(f"{path}: ", end="", flush=True)
        try:
            print("stored" if store(path.resolve()) else "as it was")
        except CellExecutionError as error:
            sys.exit(f"a cell failed, nothing is stored\n{error}")
    if not chosen:
        sys.exit("no notebooks found")


if __name__ == "__main__":
    main()
