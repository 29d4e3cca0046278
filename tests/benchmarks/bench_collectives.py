"""Hand-written collectives: replay against closed form, lesson 02 under nbval, and its widget in a real browser. Prints ratios.

python tests/benchmarks/bench_collectives.py
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "browser"), str(ROOT / "tests" / "parallel"), str(Path(__file__).parent)]
import collective_programs as programs  # noqa: E402
from bench_slider import CLOCK  # noqa: E402
from conftest import FLAGS, find_chromium  # noqa: E402
from lab_server import JupyterLab  # noqa: E402
from pages import NotebookPage  # noqa: E402
from parts import part  # noqa: E402

from lessons_lib import replay, run  # noqa: E402
from lessons_lib.algorithms import ALGORITHMS  # noqa: E402
from lessons_lib.hardware import ETHERNET_10G, NVLINK4, Cluster, Device  # noqa: E402

INSTANT = Device(1e30, 1e30, 1e30, 1.0)
ELEMENTS, RANKS, PRESSES = 840 * 64, 8, 30
CELL = """from lessons_lib.explorers.collective_explorer import compare_collectives
from lessons_lib.hardware import NVLINK4

w = compare_collectives(NVLINK4)
for box in w.boxes.values():
    box.value = True
w"""
PYTHON = """import statistics, time

def seconds(value):
    start = time.perf_counter()
    w.bandwidth.value = value
    return time.perf_counter() - start

print(f"{1e3 * statistics.median(seconds(300 / 1.05**i) for i in range(25)):.2f}")"""


def closed_forms() -> None:
    """Largest relative difference of replay and closed form, for each link; 215 kB over 8 ranks."""
    built = [a for a in ALGORITHMS if a.program and a.program != "chain_broadcast"]
    recording = run(programs.labelled, [a.program for a in built], ELEMENTS, ranks=RANKS, shapes_only=True)
    for link, regime in ((NVLINK4, "latency-bound"), (ETHERNET_10G, "both terms count")):
        cluster = Cluster(INSTANT, intra_node=link)
        ratios = {}
        for a in built:
            predicted = a.time(4 * ELEMENTS, RANKS, link.bandwidth, link.latency)
            ratios[a.program] = replay(part(recording, a.program), cluster).step_time / predicted
        worst = max(ratios, key=lambda name: abs(ratios[name] - 1))
        print(
            f"{len(built)} collectives over {link.name} ({regime}): replayed / predicted is 1 to within "
            f"{abs(ratios[worst] - 1):.0e} (most in {worst})"
        )


def lesson() -> None:
    """Seconds of lesson 02 under nbval, strict (measured)."""
    start = time.perf_counter()
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "notebooks/02_collectives.ipynb"], cwd=ROOT, capture_output=True, text=True
    )
    told = ran.stdout.strip().splitlines()[-1]
    print(f"lesson 02 under nbval: {time.perf_counter() - start:.0f} s (measured; at most 90 on 2 cores): {told}")


def widget() -> None:
    """From key press to drawn picture, in the page's own clock (measured)."""
    import nbformat
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        folder = Path(scratch, "notebooks")
        folder.mkdir()
        cells = [nbformat.v4.new_code_cell(text) for text in (CELL, PYTHON)]
        metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}}
        nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), folder / "widget.ipynb")
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=FLAGS)
        try:
            with JupyterLab(folder, Path(scratch)) as lab:
                page = browser.new_page(viewport={"width": 1280, "height": 900})
                notebook = NotebookPage(page, lab, "widget.ipynb")
                notebook.run_all()
                python = float(notebook.outputs()[1])
                for number, name in ((0, "size"), (2, "bandwidth")):
                    handle = page.locator(".noUi-handle").nth(number)
                    handle.evaluate(CLOCK)
                    notebook.press(handle, "ArrowLeft")
                    page.wait_for_timeout(500)
                    page.evaluate("window.times.length = 0")  # the first press pays for what is loaded only once
                    for i in range(PRESSES):
                        notebook.press(handle, "ArrowLeft" if i < PRESSES // 2 else "ArrowRight")
                        page.wait_for_function(f"window.times.length > {i}", timeout=5000)
                        page.wait_for_timeout(150)  # a person's pace
                    times = page.evaluate("window.times")
                    slow = statistics.quantiles(times, n=10)[8]
                    middle = statistics.median(times)
                    print(
                        f"widget of lesson 02, all algorithms, slider of {name}: key press to picture {middle:.0f} ms at the",
                        end=" ",
                    )
                    print(f"median, {slow:.0f} ms for 9 of 10 (aim: 60); Python's part {python:.1f} ms (measured)")
        finally:
            browser.close()


def main() -> None:
    closed_forms()
    lesson()
    widget()


if __name__ == "__main__":
    main()
