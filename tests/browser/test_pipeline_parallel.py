"""The widget as lesson 05 sets it, in a real JupyterLab: the lesson's questions answered by real keys."""

import re

import nbformat
import pytest
from lab_server import ROOT
from pages import wait_until
from test_pipeline import PipelineOnPage

pytestmark = pytest.mark.browser
SETUP = """from lessons_lib import explore_pipeline, shapes
from lessons_lib.hardware import ETHERNET_100G, H100

llama, LENGTH = shapes.LLAMA3_70B, 8192"""


def lesson_cell() -> str:
    notebook = nbformat.read(ROOT / "notebooks" / "05_pipeline_parallel.ipynb", as_version=4)
    (source,) = [cell.source for cell in notebook.cells if cell.source.startswith("explore_pipeline(")]
    return source


class Questions(PipelineOnPage):
    """What the questions under the widget ask for."""

    def move(self, slider, keys, words):
        self.notebook.press(self.grip(slider), keys[0], times=keys[1])
        wait_until(words, lambda: words in self.settings())
        self.notebook.wait_for_idle()

    def idle(self) -> float:
        return self.bubbles()[1]

    def take(self, schedule) -> float:
        self.choose(schedule)
        wait_until(schedule, lambda: self.settings().startswith(schedule))
        self.notebook.wait_for_idle()
        return self.step_time()


@pytest.mark.parametrize("width", [1280, 900])
def test_the_lessons_questions_have_answers(open_notebook, page, width):
    page.set_viewport_size({"width": width, "height": 900})
    notebook = open_notebook("pipeline_parallel.ipynb", [SETUP, lesson_cell()])
    notebook.run_all()
    shown = Questions(notebook)
    assert shown.settings().startswith("1F1B: Llama-3 70B on 8 ranks, 10 layers each; 16 microbatches of 1 x 8,192 tokens")
    area = shown.root.locator("xpath=ancestor::*[contains(@class,'jp-OutputArea-output')]").first
    assert area.evaluate("element => element.scrollWidth <= element.clientWidth + 1")
    size = shown.root.bounding_box()

    assert shown.idle() > 100 / 3  # 1: at most a third of the step idle
    shown.move("Microbatches m", ("ArrowRight", 1), "; 20 microbatches")
    assert shown.idle() < 100 / 3

    before = shown.idle()  # 4: the ratio does nothing to 1F1B
    shown.move("Backward takes", ("ArrowRight", 4), "backward takes 4 times a forward")
    assert abs(shown.idle() - before) < 0.5
    shown.move("Backward takes", ("ArrowLeft", 4), "backward takes 3 times a forward")

    shown.move("Microbatches m", ("ArrowLeft", 5), "; 8 microbatches")  # 2: as many as stages
    near = {name: shown.take(name) for name in ("GPipe", "1F1B", "interleaved 1F1B", "ZB-H1")}
    assert near["ZB-H1"] < near["interleaved 1F1B"] < near["1F1B"] == pytest.approx(near["GPipe"], rel=0.01)

    notebook.press(shown.grip("Bandwidth of the link"), "Home")  # 3: a slow link
    wait_until("the link follows", lambda: shown.step_time() > near["ZB-H1"])
    notebook.wait_for_idle()
    far = {name: shown.take(name) for name in near}
    assert max(near, key=lambda name: far[name] - near[name]) == "interleaved 1F1B"
    assert re.search(r"The link adds [\d.,]+ m?s \(", shown.sentence())
    after = shown.root.bounding_box()
    assert (after["width"], after["height"]) == (size["width"], size["height"]) and notebook.errors() == []
