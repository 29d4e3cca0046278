"""Every lesson in a real JupyterLab: read as stored, run from top to bottom, its slider moved by keyboard."""

import nbformat
import pytest
from explorer import ExplorerOnPage
from lab_server import ROOT
from pages import wait_until

from lessons_lib import lab as facts

pytestmark = pytest.mark.browser
LESSONS = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
BROKEN = ("model not found", "Error displaying widget", "Loading widget")


def cells_that_raise(name: str) -> int:
    notebook = nbformat.read(ROOT / "notebooks" / name, as_version=4)
    return sum("raises-exception" in cell.metadata.get("tags", []) for cell in notebook.cells)


@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_reads_well_runs_and_answers(open_notebook, name):
    notebook = open_notebook(name)

    # Read before anything has run: pictures and their words are there, no slider that would not move.
    still = notebook.page.locator(".jp-RenderedHTMLCommon [class^=static-] img")
    wait_until("the stored pictures are drawn", lambda: still.count() > 0, 30)
    stored = "\n".join(notebook.outputs())
    assert not [words for words in BROKEN if words in stored]
    assert notebook.page.locator(".noUi-handle").count() == 0

    notebook.run_all()
    assert len(notebook.errors()) == cells_that_raise(name), notebook.errors()
    shown = "\n".join(notebook.outputs())
    assert not [words for words in BROKEN if words in shown]
    if name.startswith("00"):
        wait_until("widgets are live", lambda: facts.LIVE in "\n".join(notebook.outputs()))

    explorer = ExplorerOnPage(notebook)
    assert explorer.count() > 0
    explorer.handle.scroll_into_view_if_needed()
    explorer.show_last_choice()
    before = explorer.step_time(), explorer.picture(), explorer.sentence(), explorer.settings(), explorer.bandwidth()

    notebook.press(explorer.handle, "Home")  # the slowest link
    wait_until("the sentence follows", lambda: explorer.sentence() != before[2])
    notebook.wait_for_idle()
    assert explorer.bandwidth() < before[4]
    assert explorer.step_time() > before[0]
    assert explorer.picture() != before[1]
    assert explorer.settings() != before[3]
    slowest = explorer.step_time()

    notebook.press(explorer.handle, "ArrowRight", times=30)  # faster than pictures can be drawn: the last one wins
    notebook.wait_for_idle()
    faster = explorer.step_time()
    assert faster < slowest
    notebook.page.wait_for_timeout(500)
    assert explorer.step_time() == faster  # no older picture arrives late


@pytest.mark.parametrize("width", [1280, 900])
def test_the_widget_fits_the_page(open_notebook, page, width):
    page.set_viewport_size({"width": width, "height": 900})
    notebook = open_notebook(LESSONS[0])
    notebook.run_all()
    explorer = ExplorerOnPage(notebook)
    explorer.handle.scroll_into_view_if_needed()
    area = explorer.root.locator("xpath=ancestor::*[contains(@class,'jp-OutputArea-output')]").first
    assert area.evaluate("element => element.scrollWidth <= element.clientWidth + 1")
    size = explorer.root.bounding_box()
    notebook.press(explorer.handle, "Home")
    notebook.wait_for_idle()
    after = explorer.root.bounding_box()
    assert (after["width"], after["height"]) == (size["width"], size["height"])  # the picture keeps its place and size
