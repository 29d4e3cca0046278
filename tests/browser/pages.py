"""What a person does with a notebook in JupyterLab, each step with a time-out and a sentence for when it does not come true."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

READY_MS = 60_000  # JupyterLab's own code, loaded cold on a busy machine
IDLE_SECONDS = 300  # all cells of a lesson on a busy machine


def wait_until(what: str, condition: Callable[[], Any], seconds: float = 15.0) -> Any:
    """The first true value of `condition()`; AssertionError with `what` when none comes within `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:g} s in vain: {what} (last: {value!r})")
        time.sleep(0.05)


class NotebookPage:
    """One notebook, open in a browser page."""

    def __init__(self, page, lab, notebook: str):
        self.page, self.lab, self.notebook = page, lab, notebook
        page.goto(lab.page_url(notebook), wait_until="domcontentloaded", timeout=READY_MS)
        page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=READY_MS)
        self.wait_for_idle()

    def status(self) -> str:
        """What the status bar says of the kernel: "Python 3 (ipykernel) | Idle"."""
        texts = self.page.locator("#jp-main-statusbar").all_inner_texts()
        return " ".join(texts).replace("\n", " ")

    def wait_for_idle(self, seconds: float = IDLE_SECONDS) -> None:
        """Until the kernel has nothing to do, twice in a row: widgets' messages come in bursts."""
        for _ in range(2):
            wait_until("the kernel is idle", lambda: "Idle" in self.status(), seconds)
            self.page.wait_for_timeout(200)

    def run_all(self, seconds: float = IDLE_SECONDS) -> None:
        """Run > Run All Cells, and wait until every cell has run. AssertionError shows the first cell that failed."""
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        wait_until("every cell has run", self._all_run, seconds)
        self.wait_for_idle(seconds)

    def _all_run(self) -> bool:
        prompts = self.page.locator(".jp-CodeCell .jp-InputPrompt").all_inner_texts()
        return bool(prompts) and not any("*" in prompt for prompt in prompts) and bool(re.search(r"\d", prompts[-1]))

    def errors(self) -> list[str]:
        """The error outputs on the page."""
        return self.page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']").all_inner_texts()

    def text(self, selector: str) -> str:
        """What a person reads in the first element that matches."""
        return self.page.locator(selector).first.inner_text()

    def press(self, selector: str, key: str, times: int = 1) -> None:
        """Move the keyboard's focus to an element, then press a key `times` times."""
        self.page.locator(selector).first.scroll_into_view_if_needed()
        self.page.locator(selector).first.focus()
        for _ in range(times):
            self.page.keyboard.press(key)
