"""A timeline as Chrome trace events, to be opened at ui.perfetto.dev (or chrome://tracing) and zoomed into.

Format: "Trace Event Format" (Chromium project). One process a rank. Its first track holds compute and communication as complete
events ("X"); further tracks hold its transfers, as many as overlap. An arrow (flow events "s" and "f") leads from the sender's
transfer to the receiver's. Times are microseconds, rounded to nanoseconds so that neighbours never overlap.
"""

from __future__ import annotations

import heapq
import json
from pathlib import Path

import numpy as np

from .wording import KINDS

LONGEST = 9e9  # seconds: nanoseconds in a 64-bit integer


def to_perfetto(timeline, path) -> None:
    """Write the timeline to `path` as JSON."""
    events = [*_names(timeline), *_spans(timeline)]
    events += _transfers(timeline)
    about = {"title": timeline.title, "kind": timeline.kind, "step time (s)": timeline.step_time}
    data = {"traceEvents": events, "displayTimeUnit": "ns", "otherData": about}
    Path(path).write_text(json.dumps(data, allow_nan=False), encoding="utf-8")


def _meta(what: str, pid: int, tid: int, **args) -> dict:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _names(timeline) -> list[dict]:
    out = []
    for rank in range(timeline.world_size):
        out.append(_meta("process_name", rank, 0, name=f"rank {rank} ({timeline.kind})"))
        out.append(_meta("process_sort_index", rank, 0, sort_index=rank))
        out.append(_meta("thread_name", rank, 0, name="compute and communication"))
        out.append(_meta("thread_sort_index", rank, 0, sort_index=0))
    return out


def _nanoseconds(seconds: np.ndarray) -> np.ndarray:
    if np.max(seconds, initial=0.0) > LONGEST:
        raise ValueError(f"A trace counts nanoseconds and holds at most {LONGEST:,.0f} s: take a faster link or device.")
    return np.rint(np.asarray(seconds, dtype=float) * 1e9).astype(np.int64)


def _spans(timeline) -> list[dict]:
    columns, labels, details = timeline.columns, timeline.labels, timeline.details
    start, end = _nanoseconds(columns["start"]).tolist(), _nanoseconds(columns["end"]).tolist()
    rows = zip(
        columns["rank"].tolist(), start, end, columns["kind"].tolist(), columns["label"].tolist(), columns["detail"].tolist()
    )
    out = []
    for rank, begin, stop, kind, label, detail in rows:
        if KINDS[kind] == "idle":
            continue  # an empty track says it
        done = details[detail] if detail >= 0 else ""
        name = (labels[label] if label >= 0 else "") or done.split(" ")[0] or KINDS[kind]
        out.append(
            {"ph": "X", "name": name, "cat": KINDS[kind], "pid": rank, "tid": 0, "ts": begin / 1000, "dur": (stop - begin) / 1000,
             "args": {"kind": KINDS[kind], "detail": done}}
        )  # fmt: skip
    return out


class Tracks:
    """Gives every transfer of one rank a track (1, 2, ...) on which nothing else is at that time."""

    def __init__(self):
        self.busy: list[tuple[int, int]] = []  # (busy until, track)
        self.count = 0

    def take(self, start: int, end: int) -> int:
        """Calls come in order of start."""
        if self.busy and self.busy[0][0] <= start:
            track = heapq.heappop(self.busy)[1]
        else:
            self.count += 1
            track = self.count
        heapq.heappush(self.busy, (end, track))
        return track


def _transfers(timeline) -> list[dict]:
    columns = {name: column.tolist() for name, column in timeline.transfer_columns.items()}
    start, end = _nanoseconds(columns["start"]), _nanoseconds(columns["end"])
    tracks = [Tracks() for _ in range(timeline.world_size)]
    out = []
    for i in np.lexsort((end, start)).tolist():
        ts, dur = int(start[i]), int(end[i] - start[i])
        source, destination = columns["source"][i], columns["destination"][i]
        message = destination >= 0
        ranks = (source, destination) if message else timeline.groups[columns["group"][i]]
        names = [f"send to rank {destination}", f"receive from rank {source}"]
        for j, rank in enumerate(ranks):
            name = names[j] if message else timeline.operations[columns["operation"][i]]
            place = {"pid": rank, "tid": tracks[rank].take(ts, ts + dur)}
            args = {"bytes": columns["nbytes"][i], "ranks": list(ranks)}
            out.append({"ph": "X", "name": name, "cat": "transfer", **place, "ts": ts / 1000, "dur": dur / 1000, "args": args})
            if message:  # the arrow ends within the receiver's slice: "bp": "e" ties it to the slice around it
                phase = {"ph": "f", "bp": "e", "ts": (ts + dur // 2) / 1000} if j else {"ph": "s", "ts": ts / 1000}
                out.append({**phase, "name": "message", "cat": "message", "id": i, **place})
    for rank, used in enumerate(tracks):
        for track in range(1, used.count + 1):
            out.append(_meta("thread_name", rank, track, name=f"transfers {track}" if used.count > 1 else "transfers"))
            out.append(_meta("thread_sort_index", rank, track, sort_index=track))
    return out
