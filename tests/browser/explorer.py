"""The bandwidth widget as a person sees and moves it: what `lessons_lib.explore` shows, live in a page."""

from __future__ import annotations

import re

SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


class ExplorerOnPage:
    """One live explorer of a notebook; `number` counts them from the top of the page."""

    def __init__(self, notebook, number: int = 0):
        self.notebook = notebook
        live = notebook.page.locator(".widget-vbox:has(.widget-slider):has([role=status])")
        self.all = live
        self.root = live.nth(number)

    def count(self) -> int:
        return self.all.count()

    @property
    def handle(self):
        """What the keyboard moves: the handle of the bandwidth slider."""
        return self.slider("Bandwidth of the link").locator(".noUi-handle")

    def slider(self, name: str):
        """The shown slider that follows the text `name`: its track, handle and readout."""
        label = self.root.locator(f".widget-label:visible:has-text('{name}')").first
        return label.locator("xpath=following-sibling::*[contains(@class,'widget-slider') or contains(@class,'slider')]").first

    def show_last_choice(self) -> None:
        """Where there are several recordings to choose from, show the last: the first may be one that does not communicate."""
        first = self.root.locator(".widget-label:visible").nth(1).text_content()  # innerText is empty far from the window
        if self.root.locator("svg[aria-label^='Replayed step time by']").count():
            self.notebook.press(self.slider(first).locator(".noUi-handle"), "End")
            self.notebook.wait_for_idle()

    def sentence(self) -> str:
        """The finding, in bold above the picture."""
        return self.root.locator("[role=status] p").first.text_content()

    def settings(self) -> str:
        return self.root.locator("[role=status] p").nth(1).text_content()

    def step_time(self) -> float:
        """Seconds, as the sentence says them."""
        found = re.search(r"step ([\d.,]+) (ns|us|ms|s)\b", self.sentence())
        assert found, self.sentence()
        return float(found[1].replace(",", "")) * SECONDS[found[2]]

    def picture(self) -> str:
        """The timeline as it is drawn: the source of its SVG."""
        return self.root.locator(".fitted > svg").evaluate("element => element.outerHTML")

    def bandwidth(self) -> float:
        """GB/s per direction, as the slider's own readout says it."""
        return float(self.slider("Bandwidth of the link").locator(".widget-readout").text_content().replace(",", ""))
