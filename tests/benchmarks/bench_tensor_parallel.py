"""Tensor parallel: recordings at real size, lesson 04 and its solutions under nbval, its widget in a real browser. Measured.

python tests/benchmarks/bench_tensor_parallel.py
"""

import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "browser"), str(Path(__file__).parent)]
from _lesson import page_with, under_nbval  # noqa: E402
from bench_slider import CLOCK, pressed  # noqa: E402
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


def widget() -> None:
    """From key press to drawn picture, in the page's own clock."""
    with page_with([CELL]) as (page, notebook):
        for number, what in enumerate(("ranks", "bandwidth", "latency")):
            handle = page.locator(".noUi-handle").nth(number)
            handle.evaluate(CLOCK)
            presses = 6 if what == "ranks" else 30  # it has five notches, and begins at the last
            time_shown = pressed(page, notebook, handle, ("ArrowLeft", "ArrowRight"), presses)
            print(f"widget of lesson 04, {what}: {time_shown} (measured)")


def main() -> None:
    recordings()
    under_nbval("04_tensor_parallel")
    widget()


if __name__ == "__main__":
    main()
