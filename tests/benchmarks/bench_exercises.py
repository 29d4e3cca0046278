"""What exercises cost: seconds for each check of a right answer, and thirty learners who check at the same moment.

python tests/benchmarks/bench_exercises.py                 # each solution's check, and each solution notebook as nbval runs it
python tests/benchmarks/bench_exercises.py --kernels 30    # thirty kernels check at once: memory, processor time, waiting
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import statistics
import sys
import threading
import time
from pathlib import Path

HOME = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(HOME), str(HOME / "tests")]
os.environ["LESSONS_PROGRESS"] = ""

import nbformat  # noqa: E402
import store_outputs  # noqa: E402

SOLUTIONS = sorted((HOME / "solutions").glob("*.ipynb"))


def sources(path: Path) -> list[str]:
    return [
        cell.source for cell in nbformat.reads(path.read_text(encoding="utf-8"), as_version=4).cells if cell.cell_type == "code"
    ]


def solutions() -> None:
    print(f"Solutions, measured here on {os.cpu_count()} cores:")
    for path in SOLUTIONS:
        begun = time.perf_counter()
        store_outputs.execute(nbformat.reads(path.read_text(encoding="utf-8"), as_version=4), path.parent)
        print(f"  {path.name}: {time.perf_counter() - begun:.0f} s in a fresh kernel (at most 90 are allowed)")
        space: dict = {}
        for source in sources(path):
            if not re.match(r"check\((\w+)\)$", source):
                if "BEGIN SOLUTION" in source or "import" in source:
                    exec(source, space)
                continue
            times = []
            for _ in range(3):
                begun = time.perf_counter()
                with contextlib.redirect_stdout(None):
                    exec(source, space)
                times.append(time.perf_counter() - begun)
            print(f"    {source}: {statistics.median(times):.1f} s")


def kernels(count: int) -> None:
    import psutil
    from jupyter_client import KernelManager

    cells = [source for source in sources(SOLUTIONS[1]) if "import" in source or "def left_reduce_scatter" in source]
    setup, ask = "\n".join(cells), "check(left_reduce_scatter)"
    managers, clients = [], []
    try:
        for _ in range(count):
            manager = KernelManager(kernel_name="python3")
            manager.start_kernel(cwd=str(HOME))
            managers.append(manager)
        for manager in managers:
            clients.append(manager.client())
            clients[-1].start_channels()
            clients[-1].wait_for_ready(timeout=300)
        for client in clients:  # once each, in turn: torch is loaded, the template stands
            run(client, f"{setup}\n{ask}")
        roots = [psutil.Process(m.provisioner.process.pid) for m in managers]
        print(f"{count} kernels, each with one check behind it, measured here on {os.cpu_count()} cores:")
        print(f"  memory (PSS) while nobody checks: {memory(roots) / 1e9:.1f} GB, {memory(roots) / 1e6 / count:.0f} MB a learner")
        idle = psutil.cpu_times()
        results, peak, begun = [], 0, time.perf_counter()
        threads = [threading.Thread(target=lambda c=client: results.append(run(c, ask))) for client in clients]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            peak = max(peak, memory(roots))
            time.sleep(1)
        busy = psutil.cpu_times()
        spent = (busy.user + busy.system) - (idle.user + idle.system)
        waited, passed = sorted(seconds for seconds, _ in results), sum("Passed" in text for _, text in results)
        print(
            f"  all check at once: {passed} of {count} pass; median {statistics.median(waited):.0f} s, slowest {waited[-1]:.0f} s"
        )
        print(f"  processor time {spent / count:.1f} s a check; memory at most {peak / 1e9:.1f} GB")
        print(f"  all done after {time.perf_counter() - begun:.0f} s; a check alone: {run(clients[0], ask)[0]:.1f} s")
        for _, text in results:
            if "Passed" not in text:
                print(text[:600])
                break
    finally:
        for client in clients:
            client.stop_channels()
        for manager in managers:
            manager.shutdown_kernel(now=True)


def run(client, code: str) -> tuple[float, str]:
    """Seconds until the cell has run, and what it showed."""
    begun, text = time.perf_counter(), ""
    request = client.execute(code)
    while True:
        message = client.get_iopub_msg(timeout=600)
        if message["parent_header"].get("msg_id") != request:
            continue
        text += message["content"].get("text", "") + "\n".join(message["content"].get("traceback", []))
        if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            return time.perf_counter() - begun, text


def memory(roots) -> int:
    """Bytes (PSS) of these processes and all that they started."""
    import psutil

    total = 0
    for root in roots:
        for process in [root, *root.children(recursive=True)]:
            try:
                total += process.memory_full_info().pss
            except psutil.Error:
                pass  # it has just ended
    return total


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=int, default=0)
    arguments = parser.parse_args()
    kernels(arguments.kernels) if arguments.kernels else solutions()
