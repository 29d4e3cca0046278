"""The bandwidth widget over several recordings in a real JupyterLab: chosen and moved by real keys."""

import re

import pytest
from explorer import SECONDS, ExplorerOnPage
from pages import wait_until

pytestmark = pytest.mark.browser
CELL = """from lessons_lib import Cluster, Recording, explore
from lessons_lib.hardware import H100
from lessons_lib.recording import RankLog

def sliced(ranks):
    logs = [RankLog(r, ranks) for r in range(ranks)]
    for log in logs:
        for layer in range(12):
            log.compute(flops=6e12 / ranks, label=f"layer {layer}")
            if ranks > 1:
                log.collective("all_reduce", 50_000_000)
    return Recording.from_logs(logs)

explore({str(n): sliced(n) for n in (1, 2, 4, 8, 16)}, Cluster(H100, nodes=2), name="Tensor parallel ranks")"""


class ChoicesOnPage(ExplorerOnPage):
    """The live explorer of several recordings."""

    @property
    def choice(self):
        return self.slider("Tensor parallel ranks")

    def bars(self) -> dict[str, float]:
        """The picture of all choices: name -> seconds."""
        texts = self.root.locator("svg[aria-label^='Replayed step time by'] text").all_text_contents()[1:-2]
        times = [text.replace(" best", "").replace(",", "").split() for text in texts[1::2]]
        return {name: float(number) * SECONDS[unit] for name, (number, unit) in zip(texts[::2], times)}


@pytest.mark.parametrize("width", [1280, 900])
def test_choice_and_link_move_everything_and_all_keeps_its_place(open_notebook, page, width):
    page.set_viewport_size({"width": width, "height": 900})
    notebook = open_notebook("choices.ipynb", [CELL])
    notebook.run_all()
    shown = ChoicesOnPage(notebook)
    assert shown.choice.locator(".widget-readout").inner_text() == "1"
    area = shown.root.locator("xpath=ancestor::*[contains(@class,'jp-OutputArea-output')]").first
    assert area.evaluate("element => element.scrollWidth <= element.clientWidth + 1")
    assert not page.locator("[class^=static-]").first.is_visible()
    size, first = shown.root.bounding_box(), shown.bars()
    assert list(first) == ["1", "2", "4", "8", "16"] and shown.step_time() == first["1"]
    assert "Best here: 16 (tensor parallel ranks)" in shown.sentence()

    shown.show_last_choice()
    assert shown.settings().startswith("Tensor parallel ranks 16: 16 ranks on H100") and shown.step_time() == first["16"]
    notebook.press(shown.choice.locator(".noUi-handle"), "Home")
    wait_until("the first choice is shown", lambda: shown.step_time() == first["1"])

    before = shown.picture()
    notebook.press(shown.choice.locator(".noUi-handle"), "ArrowRight", times=2)
    wait_until("the third choice is shown", lambda: shown.settings().startswith("Tensor parallel ranks 4: 4 ranks on H100"))
    notebook.wait_for_idle()
    assert shown.step_time() == first["4"] and shown.bars() == first  # the link is the same: so are the times
    assert shown.picture() != before and shown.picture().count(">rank ") == 4

    notebook.press(shown.handle, "Home")  # the slowest link inside a node
    wait_until("the sentence follows", lambda: "Best here: 1 " in shown.sentence())
    notebook.wait_for_idle()
    slow = shown.bars()
    assert slow["1"] == first["1"] and slow["4"] > 10 * first["4"] and shown.step_time() == slow["4"]
    ratio = re.search(r"4 takes ([\d.]+) times as long", shown.sentence())
    assert float(ratio[1]) == pytest.approx(slow["4"] / slow["1"], rel=0.01)

    notebook.press(shown.choice.locator(".noUi-handle"), "End")
    wait_until("the last choice is shown", lambda: shown.settings().startswith("Tensor parallel ranks 16"))
    notebook.wait_for_idle()
    assert shown.step_time() == slow["16"]
    button = shown.root.get_by_role("button", name="across nodes")
    button.focus()
    page.keyboard.press("Space")
    wait_until("the other link's sliders", lambda: shown.slider("Bandwidth of the link across nodes").count() == 1)
    notebook.press(shown.handle, "Home")
    wait_until("the step follows", lambda: shown.step_time() > slow["16"])
    notebook.wait_for_idle()
    assert {name: shown.bars()[name] for name in "1248"} == {name: slow[name] for name in "1248"}  # they stay inside a node
    after = shown.root.bounding_box()
    assert (after["width"], after["height"]) == (size["width"], size["height"])
    assert notebook.errors() == []
