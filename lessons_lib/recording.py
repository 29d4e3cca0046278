"""A recording: what every rank computed and sent, in the order in which its program did it.

Ground floor: imports no torch and nothing of ours but its tables: a saved recording can be replayed without it.

A rank's program is a list of events of five kinds:

* COMPUTE    operators that ran between two communications: how often each (FLOPs, bytes touched) occurred;
* SEND, RECV one message was posted: `peer`, `tag`, `group`, `nbytes`;
* COLLECTIVE one collective was issued: `op` ("all_reduce", ...), `group`, `nbytes` of the full buffer, as nccl-tests counts;
* WAIT       the rank waits for the event whose index is `target`.

`blocking` says that a SEND, RECV or COLLECTIVE is waited for at once (no WAIT event follows). Messages match by order:
the k-th send from a to b with the same group and tag meets the k-th receive; the k-th collective of a group is the
same one on all its members.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .table import Table

COMPUTE, SEND, RECV, COLLECTIVE, WAIT = range(5)
VERSION = 1

EVENT = np.dtype(
    [
        ("kind", "u1"),
        ("blocking", "?"),
        ("op", "i4"),  # index into Recording.ops: the collective's name; -1 otherwise
        ("peer", "i4"),  # global rank of the other side, or the collective's root; -1: none
        ("tag", "i8"),
        ("group", "i4"),  # index into Recording.groups
        ("nbytes", "i8"),
        ("target", "i8"),  # WAIT: index of the event waited for, in the same rank; -1 otherwise
        ("label", "i4"),  # index into Recording.labels: the innermost record_function; -1: none
        ("line", "i4"),  # index into Recording.lines: where in the program; -1: not known
        ("first_cost", "i8"),  # COMPUTE: its slice of the rank's costs
        ("last_cost", "i8"),
        ("start", "f8"),  # seconds on the wall clock of the run; WAIT: start and end of the waiting
        ("end", "f8"),
    ]
)

COST = np.dtype([("operator", "i4"), ("count", "i8")])  # one kind of operator within a COMPUTE event, and how often


@dataclass(frozen=True)
class Operator:
    """One distinct operator call: its name, floating-point operations, bytes read and written."""

    name: str
    flops: int
    nbytes: int


class RankLog:
    """What one rank notes while its program runs; also the way to write a recording by hand.

    Every method returns the index of the event it added. Times are seconds since the run began (0 if not measured).
    `group` are global ranks, by default all; `name` tells groups of the same ranks apart, whose operations never meet.
    """

    def __init__(self, rank: int, world_size: int):
        self.rank, self.world_size = rank, world_size
        self.events: list[tuple] = []
        self.costs: list[tuple[int, int]] = []
        self.tables: dict[str, dict] = {name: {} for name in ("ops", "groups", "labels", "lines", "operators")}

    def index(self, table: str, value: Any) -> int:
        """The number of `value` in one of the tables, given on first sight; -1 for "" and None."""
        if value is None or value == "":
            return -1
        rows = self.tables[table]
        return rows.setdefault(value, len(rows))

    def _add(self, kind, blocking=False, op=None, peer=-1, tag=0, group=None, nbytes=0, target=-1, label="", line="",
             name="", costs=(0, 0), start=0.0, end=0.0) -> int:  # fmt: skip
        group = tuple(range(self.world_size)) if group is None else tuple(group)
        self.events.append(
            (kind, blocking, self.index("ops", op), peer, tag, self.index("groups", (group, name)), nbytes, target,
             self.index("labels", label), self.index("lines", line), *costs, start, end)
        )  # fmt: skip
        return len(self.events) - 1

    def compute(self, flops=0, nbytes=0, name="op", count=1, **where) -> int:
        """`count` operators of `flops` floating-point operations and `nbytes` bytes touched each (each finite, 0 or more)."""
        if not (0 <= flops < math.inf and 0 <= nbytes < math.inf):
            raise ValueError(f"compute needs finite flops and nbytes of 0 or more, not {flops!r} and {nbytes!r}")
        return self.compute_many({self.index("operators", Operator(name, int(flops), int(nbytes))): count}, **where)

    def compute_many(self, counts: dict[int, int], **where) -> int:
        """Operators by their number in the table "operators", each with its count."""
        first = len(self.costs)
        self.costs.extend(counts.items())
        return self._add(COMPUTE, costs=(first, len(self.costs)), **where)

    def send(self, peer: int, nbytes: int, blocking=True, **where) -> int:
        return self._add(SEND, blocking, peer=peer, nbytes=nbytes, **where)

    def recv(self, peer: int, nbytes: int, blocking=True, **where) -> int:
        return self._add(RECV, blocking, peer=peer, nbytes=nbytes, **where)

    def collective(self, op: str, nbytes: int, blocking=True, root=-1, **where) -> int:
        return self._add(COLLECTIVE, blocking, op=op, peer=root, nbytes=nbytes, **where)

    def wait(self, target: int, **where) -> int:
        return self._add(WAIT, target=target, **where)


@dataclass
class Recording:
    """What N ranks did. `events[rank]` is an array of EVENT, `costs[rank]` of COST; numbers in them point into the tables."""

    world_size: int
    events: list[np.ndarray]
    costs: list[np.ndarray]
    ops: list[str]
    groups: list[tuple[int, ...]]
    labels: list[str]
    lines: list[str]
    operators: list[Operator]
    results: list[Any] = field(default_factory=list)
    output: list[tuple[int, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    shapes_only: bool = False

    @classmethod
    def from_logs(cls, logs: Sequence[RankLog], **extra) -> Recording:
        """Join the ranks' logs (in rank order) into one recording with shared tables."""
        tables: dict[str, dict] = {name: {} for name in ("ops", "groups", "labels", "lines", "operators")}
        events, costs = [], []
        for log in logs:
            ids = {
                name: np.array([rows.setdefault(v, len(rows)) for v in log.tables[name]] + [-1], dtype="i4")
                for name, rows in tables.items()
            }  # the extra -1 at the end maps "none" (-1) to itself
            ev = np.array(log.events, dtype=EVENT)
            for column, name in (("op", "ops"), ("group", "groups"), ("label", "labels"), ("line", "lines")):
                ev[column] = ids[name][ev[column]]
            co = np.array(log.costs, dtype=COST)
            co["operator"] = ids["operators"][co["operator"]]
            events.append(ev)
            costs.append(co)
        lists = {name: list(rows) for name, rows in tables.items()}
        lists["groups"] = [members for members, _ in lists["groups"]]
        return cls(len(logs), events, costs, **lists, **extra)

    # ---- what a learner counts -------------------------------------------------------------------------------

    @property
    def flops(self) -> list[int]:
        """Floating-point operations of each rank."""
        each = np.array([o.flops for o in self.operators] or [0], dtype="f8")
        return [int(round(float((each[c["operator"]] * c["count"]).sum()))) for c in self.costs]

    def _point_to_point(self, weight: str | None) -> np.ndarray:
        out = np.zeros((self.world_size, self.world_size), dtype="i8")
        for rank, ev in enumerate(self.events):
            sends = ev[ev["kind"] == SEND]
            np.add.at(out[rank], sends["peer"], sends[weight] if weight else 1)
        return out

    @property
    def sent_bytes(self) -> np.ndarray:
        """ranks x ranks: bytes sent point to point, from row to column."""
        return self._point_to_point("nbytes")

    @property
    def sent_messages(self) -> np.ndarray:
        """ranks x ranks: messages sent point to point, from row to column."""
        return self._point_to_point(None)

    @property
    def collectives(self) -> Table:
        """Each distinct collective: kind, group size, bytes of the full buffer, count (once per collective, not per member)."""
        sizes = np.array([len(group) for group in self.groups] or [0])
        rows: dict[tuple, float] = {}
        for ev in self.events:
            calls = ev[ev["kind"] == COLLECTIVE]
            keys = np.stack([calls["op"], sizes[calls["group"]], calls["nbytes"]], axis=1)
            distinct, first, counts = np.unique(keys, axis=0, return_index=True, return_counts=True)
            for i in np.argsort(first):  # in the order in which they were first issued
                op, size, nbytes = map(int, distinct[i])
                key = (self.ops[op], size, nbytes)
                rows[key] = rows.get(key, 0.0) + counts[i] / size  # every member notes the same collective
        found = [(*key, int(round(n)) or 1) for key, n in rows.items()]
        return Table(("kind", "group size", "bytes", "count"), found)

    def __repr__(self) -> str:
        sent, calls = int(self.sent_messages.sum()), sum(row[3] for row in self.collectives)
        return (
            f"Recording of {_count(self.world_size, 'rank')}: {sum(self.flops):,} FLOPs, {_count(sent, 'message')} "
            f"({int(self.sent_bytes.sum()):,} bytes), {_count(calls, 'collective')}"
        )

    # ---- save and load -------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write JSON. Results that JSON cannot hold (tensors, say) are kept as their printed form."""
        data = {
            "format": "recording",
            "version": VERSION,
            "world_size": self.world_size,
            "shapes_only": self.shapes_only,
            "ops": self.ops,
            "groups": self.groups,
            "labels": self.labels,
            "lines": self.lines,
            "operators": [[o.name, o.flops, o.nbytes] for o in self.operators],
            "events": [{name: ev[name].tolist() for name in EVENT.names} for ev in self.events],
            "costs": [{name: co[name].tolist() for name in COST.names} for co in self.costs],
            "results": self.results,
            "output": self.output,
            "warnings": self.warnings,
        }
        Path(path).write_text(json.dumps(data, default=repr), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Recording:
        """Read what `save` wrote. ValueError names the file and what is wrong with it."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not a saved recording: it does not hold JSON ({error})") from None
        if not isinstance(data, dict) or data.get("format") != "recording":
            raise ValueError(f"{path} is not a saved recording: write one with Recording.save(path)")
        if data.get("version") != VERSION:
            raise ValueError(
                f"{path} holds version {data.get('version')!r} of the format; this library reads {VERSION}: record it again"
            )
        try:
            recording = cls(
                data["world_size"],
                [_structured(EVENT, columns) for columns in data["events"]],
                [_structured(COST, columns) for columns in data["costs"]],
                groups=[tuple(group) for group in data["groups"]],
                operators=[Operator(*row) for row in data["operators"]],
                output=[tuple(line) for line in data["output"]],
                **{name: data[name] for name in ("ops", "labels", "lines", "results", "warnings", "shapes_only")},
            )
            recording._check_numbers()
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise ValueError(f"{path} is a damaged recording ({type(error).__name__}: {error}): record it again") from None
        return recording

    def _check_numbers(self) -> None:
        """ValueError if a number points outside of its table, or a table holds what it may not. Replay checks the rest."""
        ranks = self.world_size
        if isinstance(ranks, bool) or not isinstance(ranks, int) or not len(self.events) == len(self.costs) == ranks > 0:
            raise ValueError(f"world_size {ranks!r}, events of {len(self.events)} ranks, costs of {len(self.costs)}")
        for name, rows, kind in (("ops", self.ops, str), ("labels", self.labels, str), ("lines", self.lines, str)):
            _check(isinstance(rows, list) and all(isinstance(row, kind) for row in rows), f"{name} must be a list of texts")
        _check(all(_is_count(r, ranks) for group in self.groups for r in group), f"groups must list ranks below {ranks}")
        sound = all(isinstance(o.name, str) and _is_count(o.flops) and _is_count(o.nbytes) for o in self.operators)
        _check(sound, "operators must have a name, FLOPs and bytes of 0 or more")
        limits = {"op": self.ops, "group": self.groups, "label": self.labels, "line": self.lines, "peer": range(ranks)}
        for events, costs in zip(self.events, self.costs):
            for column, table in limits.items():
                _check(((events[column] >= -1) & (events[column] < len(table))).all(), f"{column} points past its table")
            inside = (costs["operator"] >= 0) & (costs["operator"] < len(self.operators)) & (costs["count"] >= 0)
            _check(inside.all(), "costs point past the operators, or count below 0")
            _check(np.isfinite(events["start"]).all() and np.isfinite(events["end"]).all(), "times must be finite")


def _check(sound: bool, what: str) -> None:
    if not sound:
        raise ValueError(what)


def _is_count(value, below: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < below


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _structured(dtype: np.dtype, columns: dict) -> np.ndarray:
    out = np.zeros(len(columns[dtype.names[0]]), dtype=dtype)
    for name in dtype.names:
        if len(columns[name]) != len(out):
            raise ValueError(f"column {name} has {len(columns[name])} rows, not {len(out)}")
        out[name] = columns[name]
    return out
