"""A pipeline that nobody has run: its recording, made from a schedule and from what each action costs; and its memory.

    forward, backward, weight = work_of_stages(shapes.GPT3_175B, stages=8, sequence=2048, microbatch=1)
    recording = record_pipeline(one_f_one_b(8, 32), forward, backward, message_bytes=boundary_bytes(shapes.GPT3_175B, 2048, 1))
    replay(recording, cluster)

The recording holds, event for event, what run_schedule records on real ranks: the same calls in the same order, labelled alike. The
work of an action is predicted from a shape, or taken from a recording of real stages (work_from). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from numbers import Real
from typing import NamedTuple

import numpy as np

from .hardware import whole
from .parallel.actions import Action, check_orders, size_of
from .parallel.schedule_calls import ARRIVED, COMPUTE, RECEIVE, SEND, SENT, calls_of, steps_of, tag_of
from .recording import COLLECTIVE, COST, EVENT, Operator, Recording
from .recording import COMPUTE as COMPUTED
from .recording import RECV as RECEIVED
from .recording import SEND as SENDS
from .recording import WAIT as WAITS
from .stage_costs import (
    StageMemory,
    Work,
    balanced_layers,
    boundary_bytes,
    layers_per_stage,
    memory_of_ranks,
    parameters_of_stages,
    work_of_stages,
)

__all__ = [
    "StageMemory", "Work", "balanced_layers", "boundary_bytes", "layers_per_stage", "memory_of_ranks", "parameters_of_stages",
    "record_pipeline", "work", "work_from", "work_of_stages",
]  # fmt: skip

NAMES = {"F": "forward", "B": "backward", "W": "weight"}


def work(flops, nbytes=0, name="op") -> Work:
    """One operator of so many floating-point operations and bytes."""
    for value, what in ((flops, "flops"), (nbytes, "nbytes")):
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value < 2**62:
            raise ValueError(f"The work of an action is {what}={value!r:.40}, but must be a finite number, 0 or more, below 2**62.")
    return Work(((Operator(name, int(flops), int(nbytes)), 1),))


# ---- the recording -----------------------------------------------------------------------------------------------------------


def record_pipeline(orders, forward, backward, weight=0, message_bytes=0, tied_bytes=0) -> Recording:
    """The recording of one training step by these orders (or by a Schedule).

    forward, backward, weight: the work of F, B and W, each a Work or a number of FLOPs, or a list of them with one for every stage
    (stage c x p + r is chunk c of rank r). Without W in the orders, B is the whole backward. message_bytes: of each message between
    stages, or a list with one for every microbatch. tied_bytes: of the tied weight's gradient, which the first and the last rank
    all-reduce at the end; 0: nothing is tied.
    """
    orders = check_orders(getattr(orders, "orders", orders))
    p, (m, v, split) = len(orders), size_of(orders)
    given = {"F": forward, "B": backward, "W": weight}
    costs = {kind: _each(given[kind], NAMES[kind], p * v) for kind in "FBW"}
    if not split:
        del costs["W"]
    nbytes = _each_microbatch(message_bytes, m)
    tied = whole(tied_bytes, "tied_bytes", 0, 2**62)
    frame = _frame(tuple(map(tuple, orders)))

    operators: dict[Operator, int] = {}
    slices, rows = {}, []  # where in the costs each action's operators are
    for kind, per_stage in costs.items():
        for stage, one in enumerate(per_stage):
            first = len(rows)
            rows += [(operators.setdefault(operator, len(operators)), count) for operator, count in one.operators]
            slices[kind, stage] = (first, len(rows))
    table = np.array(rows, dtype=COST)
    events, all_costs = [], []
    for rank in range(p):
        columns, keys, which = frame.ranks[rank]
        ev = columns.copy()
        message = ev["kind"] <= RECEIVED
        message &= ev["kind"] >= SENDS
        ev["nbytes"][message] = nbytes[frame.microbatch[rank][message]]
        bounds = np.array([slices[key] for key in keys], dtype="i8").reshape(-1, 2)[which]
        computed = ev["kind"] == COMPUTED
        # every compute event has a slice of its own, as where a program ran
        lengths = bounds[:, 1] - bounds[:, 0]
        ends = np.cumsum(lengths)
        ev["first_cost"][computed], ev["last_cost"][computed] = ends - lengths, ends
        index = np.repeat(bounds[:, 0] - (ends - lengths), lengths) + np.arange(int(ends[-1]) if len(ends) else 0)
        events.append(_with_tied(ev, tied) if tied and p > 1 and rank in (0, p - 1) else ev)
        all_costs.append(table[index])
    groups = [tuple(range(p))] + ([(0, p - 1)] if tied and p > 1 else [])
    return Recording(
        p, events, all_costs, ops=["all_reduce"] * bool(tied), groups=groups, labels=list(frame.labels), lines=[],
        operators=list(operators), shapes_only=True,
    )  # fmt: skip


class _Frame(NamedTuple):
    """A recording without costs: of each rank its events, its (kind, stage)s, and which of those each compute event is."""

    ranks: list[tuple[np.ndarray, list, np.ndarray]]
    microbatch: list[np.ndarray]  # per rank and event
    labels: tuple[str, ...]


@lru_cache(maxsize=32)
def _frame(orders: tuple) -> _Frame:
    """The events of these orders; remembered, since a slider over costs asks for the same orders again and again."""
    p, m = len(orders), size_of(orders)[0]
    labels: dict[str, int] = {}
    ranks, microbatches = [], []
    for steps, calls, rank in zip(steps_of(orders), calls_of(orders), range(p)):
        events, number_of, keys, which = [], [], {}, []
        at: dict[tuple[str, int], int] = {}  # (RECEIVE or SEND, step): its event
        for (kind, n), following in zip(calls, [*calls[1:], (None, None)]):
            action, source, target = steps[n]
            stage = action.chunk * p + rank
            if kind in (ARRIVED, SENT):
                posted = at[RECEIVE if kind == ARRIVED else SEND, n]
                if posted is not None:
                    events.append((WAITS, False, -1, -1, 0, 0, 0, posted, -1, -1, 0, 0, 0.0, 0.0))
                    number_of.append(0)
                continue
            number_of.append(action.microbatch)
            if kind == COMPUTE:
                label = labels.setdefault(str(action), len(labels))
                events.append((COMPUTED, False, -1, -1, 0, 0, 0, -1, label, -1, 0, 0, 0.0, 0.0))
                which.append(keys.setdefault((action.kind, stage), len(keys)))
                continue
            # waited for at once: a blocking call, as the recorder notes it
            blocking = following == (ARRIVED if kind == RECEIVE else SENT, n)
            at[kind, n] = None if blocking else len(events)
            peer = source if kind == RECEIVE else target
            reader = stage if kind == RECEIVE else stage + (1 if action.kind == "F" else -1)
            what, tag = RECEIVED if kind == RECEIVE else SENDS, tag_of(action, reader, m)
            events.append((what, blocking, -1, peer, tag, 0, 0, -1, -1, -1, 0, 0, 0.0, 0.0))
        ranks.append((np.array(events, dtype=EVENT), list(keys), np.array(which, dtype=int)))
        microbatches.append(np.array(number_of))
    return _Frame(ranks, microbatches, tuple(labels))


def _with_tied(events: np.ndarray, nbytes: int) -> np.ndarray:
    last = np.zeros(1, dtype=EVENT)
    for column, value in (("kind", COLLECTIVE), ("blocking", True), ("peer", -1), ("group", 1), ("nbytes", nbytes)):
        last[column] = value
    for column in ("target", "label", "line"):
        last[column] = -1
    return np.concatenate([events, last])


def _each(value, name: str, stages: int) -> list[Work]:
    values = list(value) if isinstance(value, (list, tuple)) else [value] * stages
    if len(values) != stages:
        raise ValueError(f"{name} has {len(values)} entries, but there are {stages} stages: give one for each, or one for all.")
    return [one if isinstance(one, Work) else work(one, name=name) for one in values]


def _each_microbatch(value, m: int) -> np.ndarray:
    values = list(value) if isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, str) else [value] * m
    if len(values) != m:
        raise ValueError(f"message_bytes has {len(values)} entries, but there are {m} microbatches: give one for each or for all.")
    return np.array([whole(one, "message_bytes", 0, 2**62) for one in values], dtype="i8")


# ---- work from a recording -----------------------------------------------------------------------------------------------------


def work_from(recording: Recording) -> tuple[list[Work], list[Work], list[Work]]:
    """(forward, backward, weight) of each stage, as recorded under the labels "F1", "B1", "W1" (and "F1.1" of chunk 1, ...).

    So real operators, recorded once at some m, price any other schedule and number of microbatches. Microbatch 1 counts, which adds
    its gradients to those of microbatch 0; or that one, where it is the only one. Weight is empty where backward was not split.
    """
    if not isinstance(recording, Recording):
        raise TypeError(f"A Recording is needed, from run(...), not {recording!r} (a {type(recording).__name__}).")
    p = recording.world_size
    names = set(recording.labels)
    chunks = 1
    while f"F0.{chunks}" in names:
        chunks += 1
    if "F0" not in names or "B0" not in names:
        raise ValueError(
            'The recording has no parts labelled "F0" and "B0": record run_schedule(...), gpipe_step or one_f_one_b_step.'
        )
    microbatch = 1 if "F1" in names else 0
    found = {}
    for kind in "FBW":
        for chunk in range(chunks):
            label = str(Action(kind, microbatch, chunk))
            where = recording.labels.index(label) if label in names else None
            for rank, (ev, costs) in enumerate(zip(recording.events, recording.costs)):
                total: dict[int, int] = {}
                for event in ev[(ev["kind"] == COMPUTED) & (ev["label"] == where)] if where is not None else ():
                    for operator, count in costs[event["first_cost"] : event["last_cost"]].tolist():
                        total[operator] = total.get(operator, 0) + count
                found[kind, chunk * p + rank] = Work(tuple((recording.operators[o], n) for o, n in total.items()))
    return tuple([found[kind, stage] for stage in range(p * chunks)] for kind in "FBW")
