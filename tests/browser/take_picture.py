"""Take the README's picture: the widget of lesson 00, live in a real JupyterLab.

python tests/browser/take_picture.py [file]       (default: notebooks/images/explorer.png)
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, os.path.dirname(__file__))
from conftest import FLAGS, find_chromium  # noqa: E402
from explorer import ExplorerOnPage  # noqa: E402
from lab_server import ROOT, JupyterLab  # noqa: E402
from pages import NotebookPage  # noqa: E402
from playwright.sync_api import sync_playwright  # noqa: E402

LESSON = "00_start_here.ipynb"


def take(target: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "notebooks")
        shutil.copytree(ROOT / "notebooks", folder)
        with JupyterLab(folder, Path(scratch)) as lab, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=find_chromium(), args=FLAGS)
            try:
                page = browser.new_page(viewport={"width": 1280, "height": 1200}, device_scale_factor=1.5)
                notebook = NotebookPage(page, lab, LESSON)
                notebook.run_all()
                explorer = ExplorerOnPage(notebook)
                explorer.root.scroll_into_view_if_needed()
                page.wait_for_timeout(500)
                explorer.root.screenshot(path=target)
            finally:
                browser.close()


if __name__ == "__main__":
    take(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "notebooks" / "images" / "explorer.png")
