"""The critical path: from the end of the step back to 0, always through what was waited for. Imports no torch."""

from __future__ import annotations

import numpy as np

from .matching import AWAIT, POST, Matching
from .timeline import KINDS, Span, Timeline, size_text


def operation_details(recording, matching: Matching) -> tuple[np.ndarray, list[str]]:
    """Per operation that waits: index into a list of texts such as "send 8.0 MB to rank 1"; the last text is "" (compute). Kept."""
    kept = matching.__dict__.get("_details")
    if kept is None:
        texts: dict[str, int] = {}
        seen: dict[tuple, int] = {}
        index = np.full(len(matching.operations), -1)
        waits = np.flatnonzero(matching.mode != POST)
        origin = matching.events[matching.origin[waits]]
        names = ("kind", "op", "peer", "group", "nbytes")
        for i, key in zip(waits.tolist(), zip(*(origin[name].tolist() for name in names))):
            if key not in seen:
                seen[key] = texts.setdefault(_text(recording, *key), len(texts))
            index[i] = seen[key]
        kept = matching.__dict__["_details"] = (index, [*texts, "finished", ""])
    return kept


def _text(recording, kind, op, peer, group, nbytes) -> str:
    from ..recording import COLLECTIVE, SEND

    if kind == COLLECTIVE:
        return collective_text(recording.ops[op], nbytes, len(recording.groups[group]))
    return f"send {size_text(nbytes)} to rank {peer}" if kind == SEND else f"recv {size_text(nbytes)} from rank {peer}"


def collective_text(op: str, nbytes: float, members: int) -> str:
    """ "all_reduce 4.0 MB over 4 ranks"; a barrier has no size."""
    size = "" if op == "barrier" else f" {size_text(nbytes)}"
    return f"{op}{size} over {members} rank{'s' if members != 1 else ''}"


def critical_path(recording, matching: Matching, schedule, timeline: Timeline) -> list[Span]:
    """Spans from 0 to the step time without a gap. `schedule` is simulate.Schedule, or measured times in the same form."""
    m, s = matching, schedule
    mode, transfer = m.mode.tolist(), m.transfer.tolist()
    posts = np.flatnonzero(m.mode != AWAIT)
    posts = posts[np.argsort(m.transfer[posts], kind="stable")]
    begin = np.searchsorted(m.transfer[posts], np.arange(len(m.source) + 1))
    rank_of = m.rank[m.operations].tolist()
    computing = _Computing(timeline)
    path: list[Span] = []

    def through(x: int, rank: int, now: float) -> tuple[int, int, float]:
        """Add the transfer that ended now, and those that held its ports; return what made it ready: (rank, operation, time)."""
        while True:
            begun = min(s.start[x], now)
            path.append(_moving(recording, m, x, rank, begun, now))
            now = begun
            if s.blocker[x] < 0:
                break
            x = s.blocker[x]
            rank = int(m.destination[x]) if m.destination[x] >= 0 else int(m.source[x])
        last = max(posts[begin[x] : begin[x + 1]].tolist(), key=s.at.__getitem__)
        return rank_of[last], last, now

    finish, ends = max(s.finish), [e for e in s.end]
    now = timeline.step_time
    if ends and max(ends) > finish:  # a transfer that nobody waited for outlasts the programs
        x = ends.index(max(ends))
        rank, i, now = through(x, max(int(m.destination[x]), int(m.source[x])), now)
    else:
        rank = s.finish.index(finish)
        i = int(m.first_operation[rank + 1])
    first = m.first_operation.tolist()
    while now > 0:
        i -= 1
        while i >= first[rank] and mode[i] == POST:
            i -= 1
        came_back = s.resume[i] if i >= first[rank] else 0.0
        path.extend(computing.between(rank, came_back, now))
        now = min(now, came_back)
        if i < first[rank]:
            break
        if s.resume[i] > s.at[i] and s.start[transfer[i]] >= 0:
            rank, i, now = through(transfer[i], rank, now)
    path.reverse()
    return [span for span in path if span.end > span.start]


class _Computing:
    """A rank's compute spans between two moments, last one first."""

    def __init__(self, timeline: Timeline):
        self.timeline, self.columns = timeline, timeline.columns
        self.edge = np.searchsorted(self.columns["rank"], np.arange(timeline.world_size + 1))

    def between(self, rank: int, start: float, end: float) -> list[Span]:
        c, a, b = self.columns, self.edge[rank], self.edge[rank + 1]
        low, high = a + np.searchsorted(c["start"][a:b], (start, end))
        labels = self.timeline.labels
        return [
            Span(rank, float(c["start"][i]), min(float(c["end"][i]), end), KINDS[c["kind"][i]], labels[k] if k >= 0 else "", "")
            for i in range(high - 1, low - 1, -1)
            for k in (int(c["label"][i]),)
        ]


def _moving(recording, m: Matching, x: int, rank: int, start: float, end: float) -> Span:
    nbytes = int(m.nbytes[x])
    if m.destination[x] < 0:
        op = recording.ops[m.op[x]]
        return Span(rank, start, end, "communication", op, collective_text(op, nbytes, len(recording.groups[m.group[x]])))
    detail = f"send {size_text(nbytes)} from rank {m.source[x]} to rank {m.destination[x]}"
    return Span(rank, start, end, "communication", "send", detail)
