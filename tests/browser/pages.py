"""What a person does with a notebook in JupyterLab, each step with a time-out and a sentence for when it does not come true."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

READY_MS = 60_000  # JupyterLab's own code, loaded cold on a busy machine
RUN_SECONDS = 300  # all cells of a lesson on a busy machine
QUIET = 3.0  # seconds without a running cell after which nothing more will run: an error has stopped the rest

# The browser lays out only what is near the window, so its own innerText is empty further down.
SHOWN_TEXT = """cell => {
  const text = node => {
    if (node.nodeType === Node.TEXT_NODE) return node.textContent;
    if (node.nodeType !== Node.ELEMENT_NODE || node.matches("style, script")) return "";
    if (getComputedStyle(node).display === "none") return "";
    const ends = node.matches("p, div, tr, h1, h2, h3, li, pre") ? "\\n" : " ";
    return [...node.childNodes].map(text).join("") + ends;
  };
  return [...cell.querySelectorAll(".jp-OutputArea-child")].map(text).join("").trim();
}"""


def wait_until(what: str, condition: Callable[[], Any], seconds: float = 15.0) -> Any:
    """The first true value of `condition()`; AssertionError with `what` when none comes within `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:g} s in vain until {what} (last: {value!r})")
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
        return " ".join(self.page.locator("#jp-main-statusbar").all_inner_texts()).replace("\n", " ")

    def wait_for_idle(self, seconds: float = 60) -> None:
        """Until the kernel has nothing to do, twice in a row: widgets' messages come in bursts."""
        for _ in range(2):
            wait_until("the kernel is idle", lambda: "| Idle" in self.status(), seconds)
            self.page.wait_for_timeout(200)

    def run_all(self, seconds: float = RUN_SECONDS) -> None:
        """Run > Run All Cells, and wait until every cell has run. AssertionError shows the error that stopped them."""
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        quiet_since = None

        def done():
            nonlocal quiet_since
            prompts = self.prompts()
            running = any("*" in prompt for prompt in prompts) or "| Idle" not in self.status()
            quiet_since = None if running else quiet_since or time.monotonic()
            if quiet_since and time.monotonic() - quiet_since > QUIET:
                assert re.search(r"\d", prompts[-1]), f"the last cell has not run; errors: {self.errors()[-1:]}"
            return not running and re.search(r"\d", prompts[-1])

        wait_until("every cell has run", done, seconds)
        self.wait_for_idle()

    def prompts(self) -> list[str]:
        """ "[3]:" for the cell that ran third, "[*]:" for one that runs or waits, "[ ]:" for one that has not run."""
        return self.page.locator(".jp-CodeCell .jp-InputPrompt").all_text_contents()

    def errors(self) -> list[str]:
        """The tracebacks on the page."""
        shown = self.page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']").all_text_contents()
        return [text for text in shown if "Traceback (most recent call last)" in text]

    def outputs(self) -> list[str]:
        """What a person reads below each code cell, were it scrolled to: text that a style rule hides is left out."""
        return self.page.locator(".jp-CodeCell").evaluate_all(f"cells => cells.map(cell => ({SHOWN_TEXT})(cell))")

    def press(self, target, key: str, times: int = 1) -> None:
        """Give the keyboard to `target`, as the Tab key would, and press `key`."""
        target.scroll_into_view_if_needed()
        target.focus()
        for _ in range(times):
            self.page.keyboard.press(key)

    def restart_kernel(self) -> None:
        """Kernel > Restart Kernel..., confirmed."""
        self.page.get_by_role("menuitem", name="Kernel", exact=True).click()
        self.page.get_by_role("menuitem", name=re.compile(r"^Restart Kernel…|^Restart Kernel\.\.\.")).first.click()
        self.page.get_by_role("button", name=re.compile("Restart")).last.click()
        self.wait_for_idle()
