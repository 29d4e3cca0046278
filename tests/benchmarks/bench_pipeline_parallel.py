"""Pipeline parallel: lesson 05 and its solutions under nbval, pipelines nobody ran, its widget in a real browser. Measured.

python tests/benchmarks/bench_pipeline_parallel.py
"""

import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "browser"), str(Path(__file__).parent)]
from _lesson import page_with, under_nbval  # noqa: E402
from bench_slider import CLOCK, pressed  # noqa: E402
from test_pipeline_parallel import SETUP, lesson_cell  # noqa: E402

from lessons_lib import Cluster, replay, shapes  # noqa: E402
from lessons_lib.hardware import ETHERNET_100G, H100  # noqa: E402
from lessons_lib.parallel.schedules import one_f_one_b  # noqa: E402
from lessons_lib.pipelines import boundary_bytes, record_pipeline, work_of_stages  # noqa: E402

PRESSES = {"Stages p": 8, "Microbatches m": 14, "Backward takes": 14, "Bandwidth of the link": 30,
           "Latency of the link": 30}  # fmt: skip


def recordings() -> None:
    """Milliseconds of what a slider asks for: a recording that nobody ran, and its replay."""
    for p, m in ((8, 16), (8, 64), (32, 64)):
        forward, backward, _ = work_of_stages(shapes.LLAMA3_70B, p, 8192)
        cluster, times = Cluster(H100, p, 1, inter_node=ETHERNET_100G), []
        for _ in range(7):
            start = time.perf_counter()
            made = record_pipeline(one_f_one_b(p, m), forward, backward, message_bytes=boundary_bytes(shapes.LLAMA3_70B, 8192))
            between = time.perf_counter()
            replay(made, cluster)
            times.append((1e3 * (between - start), 1e3 * (time.perf_counter() - between)))
        writing, replaying = (statistics.median(column) for column in zip(*times))
        print(f"p = {p}, m = {m}: recording {writing:.1f} ms, replay {replaying:.1f} ms at the median (measured)")


def widget() -> None:
    """From key press to drawn picture, in the page's own clock, for every slider of the lesson's widget."""
    with page_with([SETUP, lesson_cell()], height=1000) as (page, notebook):
        for what, presses in PRESSES.items():
            label = page.locator(f".widget-label:visible:has-text('{what}')").first
            slider = "xpath=following-sibling::*[contains(@class,'widget-slider') or contains(@class,'slider')]"
            handle = label.locator(slider).first.locator(".noUi-handle")
            handle.evaluate(CLOCK)
            times = pressed(page, notebook, handle, ("ArrowLeft", "ArrowRight"), presses)
            print(f"widget of lesson 05, {what}: {times} (measured)")


def main() -> None:
    recordings()
    under_nbval("05_pipeline_parallel")
    widget()


if __name__ == "__main__":
    main()
