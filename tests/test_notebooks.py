"""What holds for every lesson as it is stored. That its cells print what they hold, nbval sees (pytest --nbval)."""

import hashlib
import re
import statistics
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
LESSONS = sorted((ROOT / "notebooks").glob("*.ipynb"))
EXEMPT = {"nbval-ignore-output", "nbval-skip"}
KNOWN_TAGS = EXEMPT | {"raises-exception"}
REASONS = ("wall clock", "widget", "this machine")  # what may differ between two runs; a reason begins with one of them
MACHINE_MADE = r"/home/|/root/|/work/|/Users/|[A-Z]:\\\\?Users|/tmp/|/var/folders/|ipykernel_\d|site-packages/|0x[0-9a-f]{6,}"

sys.path.insert(0, str(ROOT / "tests"))  # for the script that stores outputs
import store_outputs  # noqa: E402


def lesson(check):
    """Run `check` once for each notebook, which it gets read and validated."""
    return pytest.mark.parametrize("notebook", [pytest.param(path, id=path.name) for path in LESSONS], indirect=True)(check)


@pytest.fixture
def notebook(request):
    found = nbformat.reads(request.param.read_text(encoding="utf-8"), as_version=4)
    nbformat.validate(found)
    return found


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tags(cell):
    return set(cell.metadata.get("tags", []))


def where(cell):
    return f"the cell that starts with {cell.source.strip().splitlines()[0]!r}"


def outputs_as_text(cell) -> str:
    """Everything that the outputs show, but for pictures in base64."""
    parts = []
    for output in cell.outputs:
        parts += [output.get("text", ""), output.get("evalue", ""), *output.get("traceback", [])]
        parts += [str(value) for kind, value in output.get("data", {}).items() if not kind.startswith("image/p")]
    return "\n".join(parts)


def test_there_are_lessons():
    assert [path.name for path in LESSONS][:2] == ["00_start_here.ipynb", "01_devices_and_links.ipynb"]


@lesson
def test_stored_as_run_once_from_top_to_bottom(notebook):
    cells = code_cells(notebook)
    assert cells
    counts = [cell.execution_count for cell in cells]
    assert counts == list(range(1, len(cells) + 1)), "run `make notebooks`: it runs and stores the lessons"


@lesson
def test_errors_are_stored_only_where_they_are_meant(notebook):
    for cell in code_cells(notebook):
        failed = any(output.output_type == "error" for output in cell.outputs)
        meant = "raises-exception" in tags(cell)
        assert failed == meant, f"{where(cell)}: error stored: {failed}, tag raises-exception: {meant}"
        warned = any(output.get("name") == "stderr" for output in cell.outputs)
        assert not warned, f"{where(cell)} writes to stderr, which looks like a failure"


@lesson
def test_every_exempt_cell_says_why(notebook):
    for cell in notebook.cells:
        unknown = tags(cell) - KNOWN_TAGS
        assert not unknown, f"{where(cell)}: unknown tags {unknown}: nbval would not heed them"
        if tags(cell) & EXEMPT:
            reason = cell.metadata.get("reason", "")
            assert reason.startswith(REASONS), f"{where(cell)} is exempt: metadata.reason must begin with one of {REASONS}"
        else:
            assert "reason" not in cell.metadata, f"{where(cell)} gives a reason and is not exempt"
        assert "NBVAL" not in cell.source, f"{where(cell)}: exempt by tag, not by a comment that learners read"


@lesson
def test_most_cells_are_compared(notebook):
    cells = code_cells(notebook)
    exempt = [cell for cell in cells if tags(cell) & EXEMPT]
    assert len(exempt) <= len(cells) / 2, f"{len(exempt)} of {len(cells)} code cells are exempt from comparison"


@lesson
def test_outputs_name_nothing_of_the_machine_that_stored_them(notebook):
    for cell in code_cells(notebook):
        found = re.search(MACHINE_MADE, outputs_as_text(cell))
        assert not found, f"{where(cell)} shows {found.group()!r}: store it with `make notebooks`, or print less"


@lesson
def test_code_cells_are_short(notebook):
    lines = {where(cell): len([line for line in cell.source.splitlines() if line.strip()]) for cell in code_cells(notebook)}
    assert max(lines.values()) <= 25, max(lines, key=lines.get)
    assert statistics.median(lines.values()) <= 8


@lesson
def test_prose_is_short(notebook):
    sentences = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            prose = re.sub(r"(?ms)^```.*?^```|^[#|>\-*!<].*?$|^\d+\. .*?$", "", cell.source)  # not: code, titles, tables, lists
            sentences.append(len(re.findall(r"[.!?:](?=\s|$)", prose)))
    assert sentences and statistics.median(sentences) <= 4, f"sentences a cell: {sentences}"


@lesson
def test_a_single_title_first(notebook):
    titles = [cell.source.splitlines()[0] for cell in notebook.cells if re.match(r"# \S", cell.source)]
    assert len(titles) == 1 and notebook.cells[0].source.startswith(titles[0])


@lesson
def test_kernel_and_metadata_are_those_of_any_machine(notebook):
    assert dict(notebook.metadata.kernelspec) == store_outputs.KERNELSPEC
    assert dict(notebook.metadata.language_info) == store_outputs.LANGUAGE
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    for cell in notebook.cells:
        assert set(cell.metadata) <= set(store_outputs.KEPT_CELL_METADATA), where(cell)
    identifiers = [cell.id for cell in notebook.cells]
    assert len(set(identifiers)) == len(identifiers)


@lesson
def test_widgets_have_a_static_form_for_pages_without_a_kernel(notebook):
    for cell in code_cells(notebook):
        for before, output in zip([None, *cell.outputs], cell.outputs):
            if store_outputs.WIDGET_VIEW in output.get("data", {}):
                html = before and before.get("data", {}).get("text/html", "")
                assert html and 'class="static-' in html and before.data["text/plain"], where(cell)


@lesson
def test_pictures_in_prose_exist_and_have_a_text(notebook):
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for text, place in re.findall(r"!\[(.*?)\]\((.*?)\)", cell.source):
                assert text and (ROOT / "notebooks" / place).is_file(), f"{place!r} with the text {text!r}"
            for place in re.findall(r"(?<!!)\]\(((?!https?:|#)[^)#]+)", cell.source):
                assert (ROOT / "notebooks" / place).exists(), f"the link to {place!r} leads nowhere"


# ---- the script that stores outputs ------------------------------------------------------------------------------


def make_notebook(*sources):
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    return nbformat.v4.new_notebook(
        cells=cells, metadata={"kernelspec": {"name": "mine", "display_name": "Mine"}, "orig_nbformat": 4}
    )


def test_storing_twice_gives_the_same_file(tmp_path):
    pytest.importorskip("ipywidgets")
    path = tmp_path / "two words é.ipynb"
    sources = (
        "import ipywidgets\n\nslider = ipywidgets.IntSlider(3)\nslider",
        "import os\n\nprint(os.environ['LESSONS_HOLD_SECONDS'], os.path.basename(os.getcwd()))",
        "import lessons_lib\n\nlessons_lib.nothing",
    )
    notebook = make_notebook(*sources)
    notebook.cells[2].metadata["tags"] = ["raises-exception"]
    notebook.cells[1].metadata.update(collapsed=True, execution={"iopub.execute_input": "2026-01-01"})
    nbformat.write(notebook, path)
    assert store_outputs.store(path) is True
    assert store_outputs.store(path) is False

    stored = nbformat.read(path, as_version=4)
    assert [cell.execution_count for cell in stored.cells] == [1, 2, 3]
    assert stored.cells[1].outputs[0].text == f"60 {tmp_path.name}\n"
    assert dict(stored.cells[1].metadata) == {}
    assert dict(stored.metadata.kernelspec) == store_outputs.KERNELSPEC
    view = stored.cells[0].outputs[0].data[store_outputs.WIDGET_VIEW]
    assert view.model_id == hashlib.md5(b"widget 0").hexdigest() and "widgets" not in stored.metadata
    assert stored.cells[2].outputs[0].ename == "AttributeError"
    shown = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(stored.cells[2].outputs[0].traceback))
    assert "lessons_lib/__init__.py" in shown.replace("\\", "/") and str(ROOT) not in shown


def test_a_cell_that_fails_unexpectedly_stops_the_storing_and_keeps_the_file(tmp_path):
    path = tmp_path / "fails.ipynb"
    nbformat.write(make_notebook("1 / 0"), path)
    before = path.read_bytes()
    with pytest.raises(store_outputs.CellExecutionError, match="division by zero"):
        store_outputs.store(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "line, shown",
    [
        (f"File {ROOT}/lessons_lib/ranks.py:12, in run(program)", "File lessons_lib/ranks.py:12, in run(program)"),
        ('File "/opt/venv/lib/python3.12/site-packages/torch/nn/x.py", line 3', 'File "torch/nn/x.py", line 3'),
        ("File ~/.pyenv/versions/3.11.7/lib/python3.11/asyncio/base.py:6", "File asyncio/base.py:6"),
        ("/tmp/ipykernel_4711/123456.py in f", "<cell> in f"),
        ("Cell In[3], line 2", "Cell In[3], line 2"),
    ],
)
def test_places_of_this_machine_are_cut_off(line, shown):
    assert store_outputs.without_places(line) == shown
