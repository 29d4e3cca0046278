"""The pipeline widget in a real JupyterLab: every slider by keyboard; words, timeline and panels follow and keep their place."""

import re

import pytest
from explorer import ExplorerOnPage
from pages import wait_until

pytestmark = pytest.mark.browser
CELL = """from lessons_lib import explore_pipeline, shapes

explore_pipeline(shapes.GPT3_13B, stages=4, microbatches=8)"""


class PipelineOnPage(ExplorerOnPage):
    """The live pipeline explorer of a page."""

    def grip(self, name):
        """The handle of a slider, by the beginning of the text beside it."""
        return self.slider(name).locator(".noUi-handle")

    def choose(self, schedule):
        button = self.root.get_by_role("button", name=schedule, exact=True)
        button.focus()
        self.notebook.page.keyboard.press("Space")

    def numbers(self) -> list[str]:
        return self.root.locator(".fitted svg .numbers text").all_text_contents()

    def memory(self) -> str:
        return self.root.locator("svg[aria-label^='Predicted peak memory']").evaluate("element => element.outerHTML")

    def bubbles(self) -> tuple[float, float]:
        """Per cent over ideal, and of the step idle."""
        found = re.search(r"the bubble is ([\d.]+)% over ideal, ([\d.]+)% of the step idle", self.sentence())
        return float(found[1]), float(found[2])


@pytest.mark.parametrize("width", [1280, 900])
def test_every_control_moves_the_pipeline_and_all_keeps_its_place(open_notebook, page, width):
    page.set_viewport_size({"width": width, "height": 900})
    notebook = open_notebook("pipeline.ipynb", [CELL])
    notebook.run_all()
    shown = PipelineOnPage(notebook)
    area = shown.root.locator("xpath=ancestor::*[contains(@class,'jp-OutputArea-output')]").first
    assert area.evaluate("element => element.scrollWidth <= element.clientWidth + 1")
    assert not page.locator("[class^=static-]").first.is_visible()
    size = shown.root.bounding_box()
    assert shown.settings().startswith("1F1B: GPT-3 13B on 4 ranks, 10 layers each; 8 microbatches")
    assert sorted(set(shown.numbers())) == list("01234567") and len(shown.numbers()) == 2 * 4 * 8
    first, step, memory = shown.bubbles(), shown.step_time(), shown.memory()

    notebook.press(shown.grip("Microbatches m"), "ArrowRight", times=2)
    wait_until("12 microbatches", lambda: "; 12 microbatches" in shown.settings())
    notebook.wait_for_idle()
    assert shown.bubbles() < first and shown.step_time() > step

    before = shown.memory(), shown.step_time()
    notebook.press(shown.grip("Stages p"), "ArrowRight")
    wait_until("5 stages", lambda: " on 5 ranks, 8 layers each" in shown.settings())
    notebook.wait_for_idle()
    assert shown.memory() != before[0] and shown.step_time() < before[1]
    notebook.press(shown.grip("Stages p"), "ArrowLeft")
    wait_until("4 stages", lambda: " on 4 ranks" in shown.settings())

    notebook.press(shown.grip("Backward takes"), "ArrowRight", times=4)
    wait_until("a ratio of 3", lambda: "backward takes 3 times a forward" in shown.settings())
    notebook.press(shown.grip("Backward takes"), "ArrowLeft", times=4)
    wait_until("a ratio of 2", lambda: "backward takes 2 times a forward" in shown.settings())
    notebook.wait_for_idle()

    before = shown.step_time(), shown.bubbles()
    shown.choose("ZB-H1")
    wait_until("the other schedule", lambda: shown.settings().startswith("ZB-H1"))
    notebook.wait_for_idle()
    assert shown.step_time() < before[0] and shown.bubbles() < before[1]
    shown.choose("interleaved 1F1B")
    wait_until("interleaved", lambda: "2 chunks of 5 layers each" in shown.settings())
    notebook.wait_for_idle()
    between = shown.step_time(), shown.picture()

    notebook.press(shown.grip("Bandwidth of the link"), "Home")
    wait_until("the link follows", lambda: shown.step_time() > between[0])
    notebook.wait_for_idle()
    assert shown.picture() != between[1] and re.search(r"The link adds [\d.,]+ m?s \(", shown.sentence())
    slow = shown.step_time()
    notebook.press(shown.grip("Latency of the link"), "End")
    wait_until("latency follows", lambda: shown.step_time() > slow)
    notebook.wait_for_idle()
    after = shown.root.bounding_box()
    assert (after["width"], after["height"]) == (size["width"], size["height"])

    notebook.press(shown.grip("Chunks v"), "Home")  # interleaved with one chunk: cannot be
    wait_until("the reason", lambda: shown.sentence().startswith("This combination cannot run. Interleaved 1F1B needs 2 chunks"))
    assert not shown.root.locator(".fitted svg").is_visible()
    after = shown.root.bounding_box()
    assert (after["width"], after["height"]) == (size["width"], size["height"])
    shown.choose("GPipe")
    wait_until("it comes back", lambda: shown.root.locator(".fitted svg").is_visible() and shown.settings().startswith("GPipe"))
    assert shown.memory() != memory and notebook.errors() == []
