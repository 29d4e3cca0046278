"""The widget of lesson 04 in a real JupyterLab: ranks and links by keyboard; sentence, timeline and comparison follow."""

import re

import pytest
from explorer import ExplorerOnPage
from pages import wait_until

pytestmark = pytest.mark.browser
# The recordings' shape without running ranks: a layer of Llama-3 8B in training has 4 all-reduces of 67 MB.
CELL = """from lessons_lib import Cluster, explore
from lessons_lib.hardware import H100, IB_NDR, NVLINK4
from lessons_lib.recording import RankLog, Recording


def layer(ranks):
    logs = [RankLog(rank, ranks) for rank in range(ranks)]
    for log in logs:
        for _ in range(4):
            log.compute(flops=4.9e12 / ranks, nbytes=1e9)
            if ranks > 1:
                log.collective("all_reduce", 2 * 8192 * 4096)
    return Recording.from_logs(logs)


eight_b = {str(t): layer(t) for t in (1, 2, 4, 8, 16)}
explore(eight_b, Cluster(H100, 2, 8, NVLINK4, IB_NDR), name="Tensor parallel ranks", start="8")"""


def share(sentence: str) -> float:
    return float(re.search(r"communication is (\d+)%", sentence)[1])


@pytest.mark.parametrize("width", [1280, 900])
def test_ranks_and_links_answer_the_keyboard(open_notebook, page, width):
    page.set_viewport_size({"width": width, "height": 900})
    notebook = open_notebook("tensor.ipynb", [CELL])
    notebook.run_all()
    shown = ExplorerOnPage(notebook)
    assert "Tensor parallel ranks 8" in shown.settings() and "Best here: 16" in shown.sentence()
    area = shown.root.locator("xpath=ancestor::*[contains(@class,'jp-OutputArea-output')]").first
    assert area.evaluate("element => element.scrollWidth <= element.clientWidth + 1")
    size = shown.root.bounding_box()
    first = share(shown.sentence()), shown.picture()

    notebook.press(shown.handle, "Home")  # 1 GB/s inside the machine: fewer ranks are better
    wait_until("the sentence follows", lambda: "Best here: 1 " in shown.sentence() or "Best here: 1," in shown.sentence())
    notebook.wait_for_idle()
    assert share(shown.sentence()) > 90 > first[0] and shown.picture() != first[1]

    ranks = shown.root.locator(".noUi-handle").first
    notebook.press(ranks, "ArrowLeft")
    wait_until("the ranks follow", lambda: "Tensor parallel ranks 4" in shown.settings())
    notebook.wait_for_idle()
    four = shown.step_time()
    notebook.press(ranks, "Home")
    wait_until("the ranks follow", lambda: "Tensor parallel ranks 1:" in shown.settings())
    notebook.wait_for_idle()
    assert share(shown.sentence()) == 0 and shown.step_time() < four

    notebook.press(ranks, "End")
    wait_until("the ranks follow", lambda: "Tensor parallel ranks 16" in shown.settings())
    notebook.wait_for_idle()
    button = shown.root.get_by_role("button", name="across nodes")
    button.focus()
    page.keyboard.press("Space")
    notebook.wait_for_idle()
    before = shown.step_time()
    notebook.press(shown.handle, "Home")
    wait_until("the link across nodes follows", lambda: shown.step_time() > before)
    notebook.wait_for_idle()
    after = shown.root.bounding_box()
    assert after["width"] == size["width"]
    assert notebook.errors() == []
