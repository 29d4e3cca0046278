"""The trace file against the rules of Chrome's trace-event format, by a validator that knows nothing of how it is written."""

import json
import math
import re

import numpy as np
import pytest

from lessons_lib import plots
from lessons_lib.hardware import Cluster, Device, Link
from lessons_lib.recording import RankLog, Recording
from lessons_lib.replay import measured, replay

TOY = Cluster(
    Device(1e9, 1e9, 1e30, 1.0, "toy"), nodes=4, devices_per_node=2, intra_node=Link(1e6, 0.0), inter_node=Link(1e5, 1e-4)
)
REQUIRED = {  # phase -> keys that the format demands, with their types
    "X": {"name": str, "cat": str, "ph": str, "ts": (int, float), "dur": (int, float), "pid": int, "tid": int},
    "M": {"name": str, "ph": str, "pid": int, "args": dict},
    "s": {"name": str, "cat": str, "ph": str, "ts": (int, float), "pid": int, "tid": int, "id": (int, str)},
    "f": {"name": str, "cat": str, "ph": str, "ts": (int, float), "pid": int, "tid": int, "id": (int, str)},
}
METADATA = {"process_name": ("name", str), "thread_name": ("name", str),
            "process_sort_index": ("sort_index", int), "thread_sort_index": ("sort_index", int)}  # fmt: skip


def problems(trace) -> list[str]:
    """What is wrong with a trace, in words; an empty list for one that keeps the rules."""
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        return ["the file is no object with a list traceEvents"]
    found = []
    if trace.get("displayTimeUnit") not in (None, "ms", "ns"):
        found.append("displayTimeUnit is neither ms nor ns")
    slices: dict[tuple, list] = {}
    flows: dict[tuple, dict[str, list]] = {}
    named = set()
    for event in trace["traceEvents"]:
        phase = event.get("ph")
        if phase not in REQUIRED:
            found.append(f"unknown phase {phase!r}")
            continue
        for key, kind in REQUIRED[phase].items():
            if not isinstance(event.get(key), kind) or isinstance(event.get(key), bool):
                found.append(f"{phase} event without a proper {key}: {event}")
        for key in ("ts", "dur"):
            if key in event and not (math.isfinite(event[key]) and event[key] >= 0):
                found.append(f"{key} is {event[key]}")
        if phase == "X":
            slices.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["dur"]))
        elif phase == "M":
            key, kind = METADATA.get(event["name"], (None, None))
            if key is None or not isinstance(event["args"].get(key), kind):
                found.append(f"metadata {event}")
            if event["name"] == "thread_name":
                named.add((event["pid"], event["tid"]))
            if event["name"] == "process_name":
                named.add(event["pid"])
        else:
            flows.setdefault((event["cat"], event["name"], event["id"]), {}).setdefault(phase, []).append(event)
    for track, items in slices.items():
        if track not in named or track[0] not in named:
            found.append(f"track {track} has no name")
        end = 0.0
        for ts, dur in sorted(items):
            if ts < end - 1e-6:
                found.append(f"slices overlap on track {track} at {ts}")
            end = max(end, ts + dur)
    for key, phases in flows.items():
        if sorted(phases) != ["f", "s"] or len(phases["s"]) != 1 or len(phases["f"]) != 1:
            found.append(f"flow {key} is not one start and one finish")
            continue
        start, finish = phases["s"][0], phases["f"][0]
        if finish["ts"] < start["ts"]:
            found.append(f"flow {key} runs backwards")
        if finish.get("bp") != "e":
            found.append(f"flow {key} ends at the next slice, not in the one around it")
        for event in (start, finish):  # a flow binds to the slice that encloses it
            if not any(ts - 1e-6 <= event["ts"] <= ts + dur + 1e-6 for ts, dur in slices.get((event["pid"], event["tid"]), [])):
                found.append(f"flow {key} touches no slice")
    return found


def written(timeline, tmp_path):
    plots.to_perfetto(timeline, tmp_path / "trace.json")

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"), parse_constant=refuse)


def exchange(label="work"):
    """Both directions at once, then a collective behind compute."""
    logs = [RankLog(r, 2) for r in range(2)]
    for log in logs:
        log.compute(flops=1e9, label=label)
        a, b = log.send(1 - log.rank, 1000, blocking=False), log.recv(1 - log.rank, 1000, blocking=False)
        log.wait(a)
        log.wait(b)
        c = log.collective("all_reduce", 1_000_000, blocking=False)
        log.compute(flops=5e9)
        log.wait(c)
    return Recording.from_logs(logs)


def random_recording(seed, ranks, rounds):
    rng = np.random.default_rng(seed)
    logs = [RankLog(r, ranks) for r in range(ranks)]
    for _ in range(rounds):
        handles = []
        for log in logs:
            log.compute(flops=float(rng.integers(1, 1e9)), label=f"part {rng.integers(5)}")
            handles.append([log.send((log.rank + 1) % ranks, int(rng.integers(1, 1e5)), blocking=False)])
        sizes = [log.events[own[0]][6] for log, own in zip(logs, handles)]
        for log, own in zip(logs, handles):
            own.append(log.recv((log.rank - 1) % ranks, sizes[(log.rank - 1) % ranks], blocking=False))
            own.append(log.collective("all_gather", 5000, blocking=False))
            log.compute(flops=float(rng.integers(1, 1e8)))
        for log, own in zip(logs, handles):
            for handle in own:
                log.wait(handle)
    return Recording.from_logs(logs)


@pytest.mark.parametrize("seed, ranks, rounds", [(0, 2, 1), (1, 3, 7), (2, 8, 40)])
def test_traces_keep_the_rules(tmp_path, seed, ranks, rounds):
    timeline = replay(random_recording(seed, ranks, rounds), TOY)
    trace = written(timeline, tmp_path)
    assert problems(trace) == []
    events = trace["traceEvents"]
    assert sum(e["ph"] == "s" for e in events) == ranks * rounds  # an arrow a message
    assert sum(e["ph"] == "X" and e["cat"] == "transfer" for e in events) == rounds * (2 * ranks + ranks)
    for rank, compute, communication, _ in timeline.breakdown():
        for kind, seconds in (("compute", compute), ("communication", communication)):
            mine = [e["dur"] for e in events if e["ph"] == "X" and e["pid"] == rank and e["tid"] == 0 and e["cat"] == kind]
            assert sum(mine) / 1e6 == pytest.approx(seconds, abs=1e-9 * (len(mine) + 1))


def test_a_small_trace_number_by_number(tmp_path):
    trace = written(replay(exchange(), TOY), tmp_path)
    assert problems(trace) == []
    slices = [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X"]
    # 1 s compute; both messages of 1 ms at once, for ports of the two directions are two; 1 s all-reduce behind 5 s compute
    assert [s for s in slices if s[0] == 0] == [
        (0, 0, "work", 0.0, 1e6),
        (0, 0, "send", 1e6, 1000.0),
        (0, 0, "compute", 1001000.0, 5e6),
        (0, 1, "send to rank 1", 1e6, 1000.0),
        (0, 2, "receive from rank 1", 1e6, 1000.0),
        (0, 1, "all_reduce", 1001000.0, 1e6),
    ]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert names[0, 0] == "compute and communication" and names[0, 1] == "transfers 1" and names[1, 2] == "transfers 2"
    processes = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert processes == ["rank 0 (replayed)", "rank 1 (replayed)"]
    arrows = {(e["ph"], e["pid"]) for e in trace["traceEvents"] if e["ph"] in "sf" and e["id"] == 0}
    assert arrows in ({("s", 0), ("f", 1)}, {("s", 1), ("f", 0)})
    about = trace["otherData"]
    assert about["kind"] == "replayed" and about["step time (s)"] == pytest.approx(6.001) and "2 ranks on toy" in about["title"]


def test_labels_of_any_kind_survive(tmp_path):
    label = 'a "quoted" <b>\n größer 並列 🚀'
    trace = written(replay(exchange(label), TOY), tmp_path)
    assert problems(trace) == [] and label in {e["name"] for e in trace["traceEvents"]}


def test_measured_and_empty_timelines_are_traces_too(tmp_path):
    log = RankLog(0, 1)
    log.compute(flops=1, start=0.25, end=0.5)
    trace = written(measured(Recording.from_logs([log])), tmp_path)
    assert problems(trace) == [] and "rank 0 (measured)" in json.dumps(trace)
    empty = written(replay(Recording.from_logs([RankLog(0, 1)]), TOY), tmp_path)
    assert problems(empty) == [] and not [e for e in empty["traceEvents"] if e["ph"] == "X"]


def test_a_step_of_centuries_is_no_trace(tmp_path):
    timeline = replay(exchange(), Cluster(Device(1e9, 1e9, 1e9), intra_node=Link(1e9, 1e12)))
    with pytest.raises(ValueError, match="holds at most 9,000,000,000 s"):
        plots.to_perfetto(timeline, tmp_path / "t.json")


def test_the_timeline_writes_its_own_trace(tmp_path):
    timeline = replay(exchange(), TOY)
    timeline.to_perfetto(str(tmp_path / "own.json"))
    assert json.loads((tmp_path / "own.json").read_text(encoding="utf-8")) == written(timeline, tmp_path)


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda events: events[4].update(dur=-1), "dur is -1"),
        (lambda events: events[4].pop("ts"), "without a proper ts"),
        (lambda events: events[4].update(tid="0"), "without a proper tid"),
        (lambda events: next(e for e in events if e["ph"] == "f").update(id=99), "not one start and one finish"),
        (lambda events: next(e for e in events if e["ph"] == "f").update(ts=9e9), "touches no slice"),
        (lambda events: next(e for e in events if e["ph"] == "f").pop("bp"), "ends at the next slice"),
        (lambda events: [events.remove(e) for e in list(events) if e["name"] == "thread_name"], "has no name"),
        (lambda events: next(e for e in events if e["name"] == "compute").update(ts=0.0), "slices overlap"),
        (lambda events: events[0].update(ph="Q"), "unknown phase"),
    ],
)
def test_the_validator_finds_what_is_wrong(tmp_path, spoil, words):
    trace = written(replay(exchange(), TOY), tmp_path)
    first = next(i for i, e in enumerate(trace["traceEvents"]) if e["ph"] == "X")
    trace["traceEvents"].insert(4, trace["traceEvents"].pop(first))
    spoil(trace["traceEvents"])
    try:
        found = " ".join(problems(trace))
    except KeyError as error:  # a slice without a start
        found = f"without a proper {error.args[0]}"
    assert re.search(words, found)
