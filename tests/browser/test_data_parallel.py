"""The widget of lesson 03 in a real JupyterLab: bucket size and link by keyboard; sentence, timeline and comparison follow."""

import nbformat
import pytest
from explorer import ExplorerOnPage
from lab_server import ROOT
from pages import wait_until

pytestmark = pytest.mark.browser
NEEDED = (
    "imports", "model", "helpers", "average_gradients", "average_gradients_flat", "training_step", "many_or_one", "cut", "Buckets",
    "bucket_recordings", "explore",
)  # fmt: skip


def widget_cells() -> list[str]:
    """The lesson's own cells that lead to its widget, with real recordings of the model of 1.3 billion parameters."""
    lesson = nbformat.read(ROOT / "notebooks" / "03_data_parallel.ipynb", as_version=4)
    sources = {cell.id: cell.source for cell in lesson.cells}
    return [sources[name] for name in NEEDED]


@pytest.mark.parametrize("width", [1280, 900])
def test_bucket_size_and_link_answer_the_keyboard(open_notebook, page, width):
    page.set_viewport_size({"width": width, "height": 900})
    notebook = open_notebook("buckets.ipynb", widget_cells())
    notebook.run_all()
    shown = ExplorerOnPage(notebook)
    assert "Bucket size 3 GB" in shown.settings() and "Best here: 100 MB" in shown.sentence()
    area = shown.root.locator("xpath=ancestor::*[contains(@class,'jp-OutputArea-output')]").first
    assert area.evaluate("element => element.scrollWidth <= element.clientWidth + 1")
    size = shown.root.bounding_box()

    steps, pictures = {}, set()
    choice = shown.root.locator(".noUi-handle").first
    for name in ("3 GB", "400 MB", "100 MB", "10 MB", "1 MB"):
        wait_until("the bucket size follows", lambda name=name: f"Bucket size {name}" in shown.settings())
        notebook.wait_for_idle()
        steps[name] = shown.step_time()
        pictures.add(shown.picture())
        notebook.press(choice, "ArrowLeft")
    assert len(pictures) == 5  # the timeline is another one each time
    assert min(steps, key=steps.get) == "100 MB" and max(steps, key=steps.get) == "3 GB"

    before = shown.sentence(), shown.step_time()
    notebook.press(shown.handle, "End")  # a fast link hides everything
    wait_until("the sentence follows", lambda: shown.sentence() != before[0])
    notebook.wait_for_idle()
    assert shown.step_time() < before[1]
    latency = shown.slider("Latency").locator(".noUi-handle")
    notebook.press(latency, "End")  # a millisecond a message: the largest buckets win
    wait_until("the best size follows", lambda: "Best here: 3 GB" in shown.sentence() or "Best here: 400 MB" in shown.sentence())
    notebook.wait_for_idle()
    after = shown.root.bounding_box()
    assert (after["width"], after["height"]) == (size["width"], size["height"])
    assert notebook.errors() == []
