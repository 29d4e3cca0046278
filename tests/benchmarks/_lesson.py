"""What the benchmarks of the lessons share: seconds under nbval, and a page of a real JupyterLab."""

import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "browser"), str(Path(__file__).parent)]
from bench_slider import opened  # noqa: E402
from conftest import FLAGS, find_chromium  # noqa: E402
from lab_server import JupyterLab  # noqa: E402


def under_nbval(lesson: str) -> None:
    """Print the seconds of a lesson and of its solutions under nbval, strict."""
    for name in (f"notebooks/{lesson}.ipynb", f"solutions/{lesson}.ipynb"):
        if not (ROOT / name).is_file():
            print(f"{name} is not there")
            continue
        start = time.perf_counter()
        ran = subprocess.run([sys.executable, "-m", "pytest", "-q", name], cwd=ROOT, capture_output=True, text=True)
        told = ran.stdout.strip().splitlines()[-1]
        print(f"{name} under nbval: {time.perf_counter() - start:.0f} s (measured; at most 90 on 2 cores): {told}")


@contextlib.contextmanager
def page_with(cells: list[str], height: int = 900):
    """(page, notebook): a notebook of these cells, run, in a browser."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        folder = Path(scratch, "notebooks")
        folder.mkdir()
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=FLAGS)
        try:
            with JupyterLab(folder, Path(scratch)) as lab:
                page = browser.new_page(viewport={"width": 1280, "height": height})
                yield page, opened(page, lab, "lesson.ipynb", cells)
        finally:
            browser.close()
