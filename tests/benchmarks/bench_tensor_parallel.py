"""Tensor parallel: recordings at real size, lesson 04 and its solutions under nbval, its widget in a real browser. Measured.

python tests/benchmarks/bench_tensor_parallel.py
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "browser"), str(Path(__file__).parent)]
from bench_slider import CLOCK, opened, pressed  # noqa: E402
from conftest import FLAGS, find_chromium  # noqa: E402
from lab_server import JupyterLab  # noqa: E402
from test_tensor_parallel_facts import EIGHT_B, GPT3, SEVENTY_B, regime, step  # noqa: E402

from lessons_lib.hardware import NVLINK4  # noqa: E402

CELL = f"""import sys

sys.path[:0] = [{str(ROOT / "tests")!r}]
from test_tensor_parallel_facts import EIGHT_B, regime

from lessons_lib import Cluster, explore
from lessons_lib.hardware import H100, IB_NDR, NVLINK4

eight_b = {{str(t): regime(EIGHT_B, "training", t) for t in (1, 2, 4, 8, 16)}}
e = explore(eight_b, Cluster(H100, 2, 8, NVLINK4, IB_NDR), name="Tensor parallel ranks", start="16")
e"""


def recordings() -> None:
    """Seconds to record a layer's forward and backward at real size, alike=True, and what the ranks gain."""
    for shape in (EIGHT_B, SEVENTY_B, GPT3):
        start = time.perf_counter()
        one, eight = (step(regime(shape, "training", t), NVLINK4) for t in (1, 8))
        seconds = time.perf_counter() - start
        print(f"{shape.name}, a layer on 1 and on 8 ranks: recorded and replayed in {seconds:.1f} s (measured);", end=" ")
        print(f"over NVLink 4 eight are {one / eight:.2f} times as fast (replayed)")


def notebooks() -> None:
    """Seconds of the lesson and of its solutions under nbval, strict."""
    for name in ("notebooks/04_tensor_parallel.ipynb", "solutions/04_tensor_parallel.ipynb"):
        if not (ROOT / name).is_file():
            print(f"{name} is not there")
            continue
        start = time.perf_counter()
        ran = subprocess.run([sys.executable, "-m", "pytest", "-q", name], cwd=ROOT, capture_output=True, text=True)
        told = ran.stdout.strip().splitlines()[-1]
        print(f"{name} under nbval: {time.perf_counter() - start:.0f} s (measured; at most 90 on 2 cores): {told}")


def widget() -> None:
    """From key press to drawn picture, in the page's own clock."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        folder = Path(scratch, "notebooks")
        folder.mkdir()
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=FLAGS)
        try:
            with JupyterLab(folder, Path(scratch)) as lab:
                page = browser.new_page(viewport={"width": 1280, "height": 900})
                notebook = opened(page, lab, "tensor.ipynb", [CELL])
                for number, what in enumerate(("ranks", "bandwidth", "latency")):
                    handle = page.locator(".noUi-handle").nth(number)
                    handle.evaluate(CLOCK)
                    presses = 6 if what == "ranks" else 30  # it has five notches, and begins at the last
                    time_shown = pressed(page, notebook, handle, ("ArrowLeft", "ArrowRight"), presses)
                    print(f"widget of lesson 04, {what}: {time_shown} (measured)")
        finally:
            browser.close()


def main() -> None:
    recordings()
    notebooks()
    widget()


if __name__ == "__main__":
    main()
