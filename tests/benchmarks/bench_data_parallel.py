"""Data parallel: lesson 03 and its solutions under nbval, its widget in a real browser, throttled runs and replays. Measured.

python tests/benchmarks/bench_data_parallel.py [notebooks] [widget] [throttle]      (all without a word)
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "browser"), str(Path(__file__).parent)]
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from _lesson import page_with, under_nbval  # noqa: E402
from bench_slider import CLOCK, pressed  # noqa: E402
from test_data_parallel import widget_cells  # noqa: E402
from torch import nn  # noqa: E402

from lessons_lib import Cluster, Link, measured, replay, run  # noqa: E402
from lessons_lib.hardware import Device  # noqa: E402
from lessons_lib.parallel import data  # noqa: E402

LINK = Link(50e6, 1e-3, "50 MB/s, 1 ms")


def widget() -> None:
    """From key press to drawn picture, in the page's own clock: the lesson's recordings at 1.3 billion parameters."""
    with page_with(widget_cells()) as (page, notebook):
        for number, what in enumerate(("bucket size", "bandwidth", "latency")):
            handle = page.locator(".noUi-handle").nth(number)
            handle.evaluate(CLOCK)
            presses = 6 if what == "bucket size" else 30  # it has five notches, and begins at the last
            time_shown = pressed(page, notebook, handle, ("ArrowLeft", "ArrowRight"), presses)
            print(f"widget of lesson 03, {what}: {time_shown} (measured)")


def flat(model):
    return lambda: data.average_gradients_flat(model, 1 / dist.get_world_size())


def one_by_one(model):
    return lambda: data.average_gradients(model, 1 / dist.get_world_size())


def buckets(model):
    return data.Buckets(model, 2**20).wait


def three_steps(model, x, synchronise):
    finish = synchronise(model)
    for _ in range(3):
        model(x).square().mean().backward()
        finish()


def throttle() -> None:
    """Wall clock over virtual time; the replay's device is as fast as this machine was in the run itself."""
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
    for ranks in (2, 3):
        for synchronise in (one_by_one, flat, buckets):
            ratios, parts = [], []
            for _ in range(3):
                recording = run(three_steps, model, torch.randn(512, 512), synchronise, ranks=ranks, throttle=LINK)
                clock = measured(recording)
                computing = max(seconds for _, seconds, _, _ in clock.breakdown())
                device = Device(recording.flops[0] / computing, 1e30, 1e30, 1.0)
                virtual = replay(recording, Cluster(device, intra_node=LINK))
                ratios.append(clock.step_time / virtual.step_time)
                parts.append((clock.breakdown()[0][2] - virtual.breakdown()[0][2]) / clock.step_time)
            best = min(range(3), key=lambda i: abs(ratios[i] - 1))
            print(
                f"throttled, {ranks} ranks, {synchronise.__name__}: step measured / replayed {ratios[best]:.3f}; exposed "
                f"communication differs by {100 * parts[best]:.1f}% of the step (best of 3)"
            )


def main() -> None:
    tasks = {"notebooks": lambda: under_nbval("03_data_parallel"), "widget": widget, "throttle": throttle}
    for name in sys.argv[1:] or tasks:
        tasks[name]()


if __name__ == "__main__":
    main()
