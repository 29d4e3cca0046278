"""Prints how fast replay and sweep are, as ratios where machines differ. Run: python tests/benchmarks/bench_replay.py"""

from __future__ import annotations

import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lessons_lib.hardware import H100, Cluster  # noqa: E402
from lessons_lib.recording import RankLog, Recording  # noqa: E402
from lessons_lib.replay import replay, sweep  # noqa: E402


def ring(ranks: int, rounds: int) -> Recording:
    """Data parallelism by hand: compute, then one ring step (isend, recv, wait), again and again. Four events a round."""
    logs = [RankLog(r, ranks) for r in range(ranks)]
    for k in range(rounds):
        for r, log in enumerate(logs):
            log.compute(flops=1e9 * (1 + (r + k) % 3), nbytes=1e6, label=f"step {k % 10}")
            handle = log.send((r + 1) % ranks, 1_000_000, blocking=False)
            log.recv((r - 1) % ranks, 1_000_000)
            log.wait(handle)
    return Recording.from_logs(logs)


def pipeline(stages: int, microbatches: int) -> Recording:
    """GPipe with asynchronous sends: activations forward, gradients backward, then an all-reduce."""
    logs = [RankLog(r, stages) for r in range(stages)]
    for r, log in enumerate(logs):
        handles = []
        for direction, before, after in ((1, r - 1, r + 1), (-1, r + 1, r - 1)):
            for k in range(microbatches):
                if 0 <= before < stages:
                    log.recv(before, 4_000_000, label=f"microbatch {k}")
                log.compute(flops=2e10 if direction > 0 else 4e10, nbytes=1e7, label=f"microbatch {k}")
                if 0 <= after < stages:
                    handles.append(log.send(after, 4_000_000, blocking=False))
        for handle in handles:
            log.wait(handle)
        log.collective("all_reduce", 64_000_000)
    return Recording.from_logs(logs)


def exchange(ranks: int, rounds: int) -> Recording:
    """Everybody posts receives from and sends to two others, computes, and waits: messages contend for ports."""
    logs = [RankLog(r, ranks) for r in range(ranks)]
    for k in range(rounds):
        for r, log in enumerate(logs):
            handles = [log.recv((r - d) % ranks, 100_000 * (d + k % 4), blocking=False) for d in (1, 2)]
            handles += [log.send((r + d) % ranks, 100_000 * (d + k % 4), blocking=False) for d in (1, 2)]
            log.compute(flops=1e9 * (1 + (r * 7 + k) % 5), nbytes=1e6)
            for handle in handles:
                log.wait(handle)
    return Recording.from_logs(logs)


def best(function, times: int = 7) -> float:
    """The quickest of several calls, in seconds."""
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        function()
        found.append(time.perf_counter() - begin)
    return min(found)


def forget(recording: Recording) -> None:
    """Drop what a sweep keeps for the next one, but the matching."""
    for name in ("_plan", "_order"):
        recording.__dict__["_matching"][1].__dict__.pop(name, None)


def main() -> None:
    cluster = Cluster(H100, devices_per_node=64)
    bandwidths = np.geomspace(1e9, 1e12, 1000)
    for name, make in (
        ("ring of 8", lambda: ring(8, 157)),
        ("pipeline of 8", lambda: pipeline(8, 86)),
        ("exchange among 8", lambda: exchange(8, 70)),
    ):
        recording = make()
        events = sum(len(e) for e in recording.events)
        begin = time.perf_counter()
        replay(recording, cluster)
        first = time.perf_counter() - begin
        one = best(lambda: replay(recording, cluster))  # noqa: B023
        many = best(lambda: sweep(recording, cluster, bandwidths=bandwidths), 7 if not name.startswith("exchange") else 3)  # noqa: B023
        anew = best(lambda: (forget(recording), sweep(recording, cluster, bandwidths=bandwidths)), 3)  # noqa: B023
        print(
            f"{name}, {events:,} events: replay {one * 1e3:.1f} ms (first {first * 1e3:.1f} ms), "
            f"sweep of 1,000 bandwidths {many * 1e3:.1f} ms = {many / one:.2f} x one replay "
            f"({anew / one:.2f} x if nothing was kept from an earlier one)"
        )
    for name, make in (("ring of 64", lambda: ring(64, 782)), ("ring of 8", lambda: ring(8, 6250))):
        recording = make()
        events = sum(len(e) for e in recording.events)
        begin = time.perf_counter()
        replay(recording, cluster)
        seconds = time.perf_counter() - begin
        begin = time.perf_counter()
        sweep(recording, cluster, bandwidths=bandwidths[::10])
        many = time.perf_counter() - begin
        recording.__dict__.pop("_matching", None)
        tracemalloc.start()
        timeline = replay(recording, cluster)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        columns = sum(c.nbytes for c in (*timeline.columns.values(), *timeline.transfer_columns.values()))
        print(
            f"{name}, {events:,} events: first replay {seconds:.2f} s, peak {peak / events:.0f} bytes an event "
            f"(timeline {columns / events:.0f}); sweep of 100 bandwidths {many:.2f} s"
        )


if __name__ == "__main__":
    main()
