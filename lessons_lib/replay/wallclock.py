"""What really happened, by the wall clock of the machine that ran the program, in the form of a replay. Imports no torch."""

from __future__ import annotations

import numpy as np

from ..recording import COMPUTE, Recording
from .critical import critical_path, operation_details
from .matching import AWAIT, POST, Matching, check, match
from .simulate import Schedule
from .timeline import Timeline, build, transfer_columns


def measured(recording: Recording) -> Timeline:
    """The wall-clock times that a run noted, as a Timeline of kind "measured".

    A rank computes except while it waits. While it waits it is idle until the last side of the message or collective has
    posted, and communicates from then on. ValueError if the recording holds no times (made by hand, or shapes only).
    """
    check(recording)
    if recording.shapes_only:
        raise ValueError(
            "This recording has shapes only: nothing was moved and nothing timed. Use replay(recording, cluster), or run the "
            "program without shapes_only=True."
        )
    m = match(recording)
    e = m.events
    if not (np.isfinite(e["start"]).all() and np.isfinite(e["end"]).all() and (e["end"] > 0).any()):
        raise ValueError(
            "This recording holds no measured times, as one written by hand does. Use replay(recording, cluster) for virtual "
            "time, or record the program with run(program)."
        )
    schedule, finish = _schedule(m)
    step_time = float(finish.max())
    at, resume = np.array(schedule.at), np.array(schedule.resume)
    start, end = np.array(schedule.start), np.array(schedule.end)
    waits = np.flatnonzero(m.mode != POST)
    where, rank = m.operations[waits], m.rank
    detail, details = operation_details(recording, m)
    blocked_rank = np.concatenate([rank[where], np.arange(m.world_size)])
    order = np.argsort(blocked_rank, kind="stable")
    blocked = (
        blocked_rank[order],
        np.concatenate([at[waits], finish])[order],
        np.concatenate([resume[waits], np.full(m.world_size, step_time)])[order],
        np.concatenate([e["label"][where], np.full(m.world_size, -1)])[order],
        np.concatenate([detail[waits], np.full(m.world_size, len(details) - 2)])[order],
    )
    own = waits[start[m.transfer[waits]] >= 0]
    moving = (rank[m.operations[own]], start[m.transfer[own]], resume[own])
    timeline = build(
        kind="measured", title=f"{m.world_size} rank{'s' if m.world_size > 1 else ''} on the machine that ran them",
        world_size=m.world_size, step_time=step_time, events=_computing(m, at[waits], resume[waits], finish, rank[where]),
        blocked=blocked, moving=moving, transfer_columns=transfer_columns(m, start, end, np.zeros(len(start), dtype=int)),
        labels=list(recording.labels), details=details, operations=["send", *recording.ops], groups=list(recording.groups),
        path=lambda: critical_path(recording, m, schedule, timeline),
    )  # fmt: skip
    return timeline


def _schedule(m: Matching) -> tuple[Schedule, np.ndarray]:
    """The measured times as a schedule, and when each rank's last event ended."""
    e = m.events
    at, resume = e["start"][m.operations].copy(), e["end"][m.operations].copy()
    finish = np.zeros(m.world_size)
    for r, (a, b) in enumerate(zip(m.first_operation, m.first_operation[1:])):
        both = np.maximum.accumulate(np.ravel(np.column_stack([at[a:b], np.where(m.mode[a:b] == POST, at[a:b], resume[a:b])])))
        at[a:b], resume[a:b] = both[::2], both[1::2]  # one rank's clock never runs backwards
        events = e[m.first[r] : m.first[r + 1]]
        finish[r] = max(events["start"].max(initial=0.0), events["end"].max(initial=0.0), resume[a:b].max(initial=0.0))

    size = len(m.source)
    posts = np.flatnonzero(m.mode != AWAIT)
    ready, posted = np.full(size, -1.0), np.bincount(m.transfer[posts], minlength=size)
    np.maximum.at(ready, m.transfer[posts], at[posts])
    start = np.where(posted >= m.needs, ready, -1.0)
    # A message is over when the first side knows of it, a collective when the last member does.
    waits = np.flatnonzero(m.mode != POST)
    first, last = np.full(size, np.inf), np.full(size, -1.0)
    np.minimum.at(first, m.transfer[waits], resume[waits])
    np.maximum.at(last, m.transfer[waits], resume[waits])
    end = np.where(m.destination >= 0, np.where(np.isfinite(first), first, -1.0), last)
    end = np.where(start >= 0, np.maximum(end, start), -1.0)
    none = [-1] * size
    return Schedule(start.tolist(), end.tolist(), ready.tolist(), at.tolist(), resume.tolist(), finish.tolist(), [], none), finish


def _computing(m: Matching, at, resume, finish, wait_rank):
    """Columns rank, start, end, label of the time that ranks do not wait, cut where the label may change."""
    rank, parts = m.rank, []
    for r in range(m.world_size):
        mine = wait_rank == r
        gap_start, gap_end = np.concatenate([[0.0], resume[mine]]), np.concatenate([at[mine], [finish[r]]])
        events = m.events[(rank == r) & (m.events["kind"] == COMPUTE)]
        gap = np.searchsorted(gap_start, events["start"], side="right") - 1
        events, gap = events[gap >= 0], gap[gap >= 0]
        first = np.ones(len(gap), dtype=bool)
        first[1:] = gap[1:] != gap[:-1]
        label = np.full(len(gap_start), -1)
        label[gap[first]] = events["label"][first]  # the first piece of a gap includes what happened just before
        more = ~first & (events["start"] < gap_end[gap])
        begin = np.concatenate([gap_start, np.maximum(events["start"][more], gap_start[gap[more]])])
        owner, label = np.concatenate([np.arange(len(gap_start)), gap[more]]), np.concatenate([label, events["label"][more]])
        order = np.lexsort((begin, owner))
        begin, owner, label = begin[order], owner[order], label[order]
        last = np.ones(len(owner), dtype=bool)
        last[:-1] = owner[1:] != owner[:-1]
        parts.append((np.full(len(owner), r), begin, np.where(last, gap_end[owner], np.append(begin[1:], 0.0)), label))
    return tuple(np.concatenate(column) for column in zip(*parts))
