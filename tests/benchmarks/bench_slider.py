"""From key press to drawn picture: the bandwidth slider in a real JupyterLab and a real Chromium. Prints medians; measured.

    python tests/benchmarks/bench_slider.py

The recording has 8 ranks, once with 500 bars on all of them together and once with 500 on each; then there are nine recordings to
choose from, of 8 ranks and about 370 events on each; then a pipeline of 8 stages and 32 microbatches. The clock is the page's own:
it starts when the key goes down and stops in the frame after the one in which the new picture was drawn.
"""

import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "browser"))
from conftest import FLAGS, find_chromium  # noqa: E402
from lab_server import JupyterLab  # noqa: E402
from pages import NotebookPage  # noqa: E402

PRESSES = 30
PROGRAM = """from lessons_lib.explorers import explore
from lessons_lib.hardware import H100, Cluster
from lessons_lib.recording import RankLog, Recording

def bars(ranks, layers):
    logs = [RankLog(rank, ranks) for rank in range(ranks)]
    for log in logs:
        for layer in range(layers):
            log.compute(flops=2e11 * (1 + log.rank / 20), nbytes=1e9, label=f"layer {{layer}}")
            log.collective("all_reduce", 20_000_000)
    return Recording.from_logs(logs)

e = explore(bars(8, {layers}), Cluster(H100))
e"""
SEVERAL = """from lessons_lib.explorers import explore
from lessons_lib.hardware import H100, Cluster
from lessons_lib.recording import RankLog, Recording

def buckets(size, ranks=8, layers=180):
    logs = [RankLog(rank, ranks) for rank in range(ranks)]
    for log in logs:
        handles = []
        for layer in range(layers):
            log.compute(flops=2e11 * (1 + log.rank / 20), nbytes=1e9, label=f"layer {layer}")
            if layer % size == 0:
                handles.append(log.collective("all_reduce", 20_000_000 * size, blocking=False))
        for handle in handles:
            log.wait(handle)
    return Recording.from_logs(logs)

sizes = (1, 2, 3, 4, 5, 6, 9, 10, 12)
e = explore({f"{20 * size} MB": buckets(size) for size in sizes}, Cluster(H100), name="Bucket size")
e"""
PIPELINE = """from lessons_lib import explore_pipeline, pipelines, shapes
from lessons_lib.explorers import pipeline_setting

e = explore_pipeline(shapes.LLAMA3_70B, stages=8, microbatches=32, schedule={schedule!r})

def forget(change):
    pipeline_setting._alone.cache_clear()  # what has been seen before is not quicker
    if change["owner"] is not e.ratio:  # which leaves the order of events as it is
        pipelines._frame.cache_clear()

for slider in (e.stages, e.microbatches, e.ratio):
    slider.observe(forget, "value")
e"""
EVENTS = "print(sum(len(events) for recording in e.choices.values() for events in recording.events))"
COUNT = "print(len(e.timeline.columns['rank']))"
PYTHON = """import statistics, time

def seconds(value):
    start = time.perf_counter()
    e.bandwidth.value = value
    return time.perf_counter() - start

print(f"{1e3 * statistics.median(seconds(300 / 1.03**i) for i in range(25)):.2f}")"""
CLOCK = """handle => {
    window.times = [];
    const picture = handle.closest('.jp-OutputArea-output').querySelector('[role=status]').closest('.widget-html-content');
    let start = null;
    handle.addEventListener('keydown', () => { start = performance.now(); }, true);
    new MutationObserver(() => {
        const began = start;
        start = null;
        if (began !== null) requestAnimationFrame(() => requestAnimationFrame(() => window.times.push(performance.now() - began)));
    }).observe(picture, {childList: true, subtree: true});
}"""


def opened(page, lab, name: str, cells) -> NotebookPage:
    """A notebook of these cells, run."""
    import nbformat

    cells = [nbformat.v4.new_code_cell(text) for text in cells]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), lab.folder / name)
    notebook = NotebookPage(page, lab, name)
    notebook.run_all()
    return notebook


def pressed(page, notebook, handle, keys=("ArrowLeft", "ArrowRight"), presses: int = PRESSES) -> str:
    """Press the first key of two some times, then the second: the median time from key to picture, in words."""
    page.evaluate("window.times = []")
    notebook.press(handle, keys[0])
    page.wait_for_timeout(500)
    page.evaluate("window.times.length = 0")  # the first press pays for what is loaded only once
    for i in range(presses):
        notebook.press(handle, keys[2 * i // presses])
        page.wait_for_function(f"window.times.length > {i}", timeout=5000)
        page.wait_for_timeout(150)  # a person's pace
    times = page.evaluate("window.times")
    slow = statistics.quantiles(times, n=10)[8]
    return f"key press to picture {statistics.median(times):.0f} ms at the median, {slow:.0f} ms for 9 of 10 (aim: 60)"


def measure_choices(page, lab) -> None:
    """Nine recordings: the choice, the bandwidth and the latency by keyboard."""
    notebook = opened(page, lab, "choices.ipynb", [SEVERAL, EVENTS])
    print(f"9 recordings of 8 ranks, {int(notebook.outputs()[1]):,} events (measured)")
    for number, what in enumerate(("choice", "bandwidth", "latency")):
        handle = page.locator(".noUi-handle").nth(number)
        handle.evaluate(CLOCK)
        if number == 0:  # it has eight notches, and begins at the first
            print(f"  {what}: {pressed(page, notebook, handle, ('ArrowRight', 'ArrowLeft'), 14)}")
        else:
            print(f"  {what}: {pressed(page, notebook, handle)}")


def measure_pipeline(page, lab, schedule: str) -> None:
    """8 stages, 32 microbatches: each slider around that."""
    notebook = opened(page, lab, f"{schedule}.ipynb", [PIPELINE.format(schedule=schedule)])
    print(f"a pipeline of 8 stages and 32 microbatches, {schedule} (measured)")
    for number, what in enumerate(("stages", "microbatches", "chunks", "ratio", "bandwidth", "latency")):
        handle = page.locator(".noUi-handle").nth(number)
        if what == "chunks" or (what in ("stages", "microbatches") and schedule.startswith("interleaved")):
            continue  # 6 or 10 ranks do not divide 32 microbatches
        handle.evaluate(CLOCK)
        page.evaluate("window.times = []")
        for i in range(24):  # to and fro
            notebook.press(handle, "ArrowLeft" if i % 2 == 0 else "ArrowRight")
            page.wait_for_function(f"window.times.length > {i}", timeout=5000)
            page.wait_for_timeout(150)
        middle = statistics.median(page.evaluate("window.times")[2:])
        print(f"  {what}: key press to picture {middle:.0f} ms at the median (aim: 60)")


def measure(page, lab, layers: int) -> None:
    notebook = opened(page, lab, f"slider{layers}.ipynb", [PROGRAM.format(layers=layers), COUNT, PYTHON])
    bars, python = (int(notebook.outputs()[1]), float(notebook.outputs()[2]))
    handle = page.locator(".noUi-handle").first
    handle.evaluate(CLOCK)
    print(f"8 ranks, {bars:,} bars: {pressed(page, notebook, handle)}; Python's part {python:.1f} ms (measured)")
    page.evaluate("window.times.length = 0")
    for _ in range(60):  # the key held down: newest value wins, nothing queues
        page.keyboard.press("ArrowLeft")
    page.wait_for_timeout(80)
    early = len(page.evaluate("window.times"))
    page.wait_for_timeout(1500)
    readout, settings = (
        page.locator(".widget-readout").first.inner_text(),
        page.locator(".widget-html [role=status] p").nth(1).inner_text(),
    )
    drawn = float(settings.split(" GB/s")[0].split("(")[-1].replace(",", ""))
    assert abs(drawn / float(readout) - 1) < 0.006, f"the slider says {readout}, the picture {drawn}"
    print(
        f"  60 presses without a pause: {early} pictures by 80 ms after the last, {len(page.evaluate('window.times'))} in the end"
    )


def main() -> None:
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        folder = Path(scratch, "notebooks")
        folder.mkdir()
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=FLAGS)
        try:
            with JupyterLab(folder, Path(scratch)) as lab:
                tasks = [(measure, 21), (measure, 250), (measure_choices,), (measure_pipeline, "1F1B")]
                for task, *options in [*tasks, (measure_pipeline, "interleaved 1F1B")]:
                    page = browser.new_page(viewport={"width": 1280, "height": 900})
                    task(page, lab, *options)
                    page.close()
                    for session in lab.api("api/sessions"):
                        lab.api(f"api/sessions/{session['id']}", "DELETE")
        finally:
            browser.close()


if __name__ == "__main__":
    main()
