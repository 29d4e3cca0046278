"""The widget of lesson 02 in a real JupyterLab: sliders and boxes by keyboard; sentence, pictures and table follow."""

import re

import pytest
from pages import wait_until

pytestmark = pytest.mark.browser
CELL = """from lessons_lib import compare_collectives
from lessons_lib.hardware import NVLINK4

compare_collectives(NVLINK4, ranks=8, nbytes=10**6)"""
SIZE, RANKS, BANDWIDTH, LATENCY = range(4)  # sliders from the top


class ComparisonOnPage:
    """The live widget of the page."""

    def __init__(self, notebook):
        self.notebook = notebook
        self.root = notebook.page.locator(".widget-vbox:has(.widget-slider):has(table)").first

    def handle(self, number):
        return self.root.locator(".noUi-handle").nth(number)

    def words(self) -> list[str]:
        return self.root.locator("[role=status] p").all_inner_texts()

    def table(self) -> dict[str, list[str]]:
        rows = self.root.locator("tbody tr").all_inner_texts()
        return {cells[0].strip(): cells[1:] for cells in (row.split("\t") for row in rows)}

    def curves(self) -> list[str]:
        return [c.get_attribute("points") for c in self.root.locator("svg polyline.curve").all()]


@pytest.mark.parametrize("width", [1280, 900])
def test_everything_follows_the_keyboard_and_keeps_its_place(open_notebook, page, width):
    page.set_viewport_size({"width": width, "height": 900})
    notebook = open_notebook("comparison.ipynb", [CELL])
    notebook.run_all()
    shown = ComparisonOnPage(notebook)
    assert "two trees in small parts is the fastest" in shown.words()[0]
    assert shown.table()["ring"][2] == "30.5 us" and len(shown.curves()) == 8
    area = shown.root.locator("xpath=ancestor::*[contains(@class,'jp-OutputArea-output')]").first
    assert area.evaluate("element => element.scrollWidth <= element.clientWidth + 1")
    static = page.locator("[class^=static-]").first
    assert not static.is_visible()  # the picture for pages without a kernel gives way
    size = shown.root.bounding_box()

    before = shown.words(), shown.curves()
    notebook.press(shown.handle(SIZE), "End")  # 10 GB
    wait_until("the sentence follows", lambda: shown.words()[0] != before[0][0])
    notebook.wait_for_idle()
    assert "ring is the fastest" in shown.words()[0] and shown.table()["ring"][5] == "100%"
    assert shown.curves() == before[1]  # the curves over size stay, the current point moves

    notebook.press(shown.handle(BANDWIDTH), "Home")
    wait_until("the link follows", lambda: "NVLink 4" not in shown.words()[2])
    notebook.wait_for_idle()
    assert shown.curves() != before[1]

    before = shown.words()
    notebook.press(shown.handle(RANKS), "ArrowRight")
    wait_until("the ranks follow", lambda: shown.words()[2].startswith("12 ranks"))
    notebook.press(shown.handle(LATENCY), "ArrowRight", times=20)
    notebook.wait_for_idle()
    latency = re.search(r"latency ([\d.]+) us", shown.words()[2])
    assert latency and float(latency[1]) > 15 and shown.words()[1] != before[1]

    after = shown.root.bounding_box()
    assert (after["width"], after["height"]) == (size["width"], size["height"])

    box = shown.root.get_by_label("halving and doubling")
    box.focus()
    page.keyboard.press("Space")
    wait_until("its row comes", lambda: "halving and doubling" in shown.table())
    notebook.wait_for_idle()
    button = shown.root.get_by_role("button", name="broadcast")
    button.focus()
    page.keyboard.press("Space")
    wait_until("the other collective", lambda: list(shown.table()) == ["naive", "binomial tree", "chain in small parts"])
    assert notebook.errors() == []
