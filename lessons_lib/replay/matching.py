"""Who meets whom: pairs up the sends, receives and collectives of a recording, by order alone.

The result does not depend on any time, so it is found once per recording and kept with it. Imports no torch.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from ..errors import Mismatch
from ..formulas import COLLECTIVES
from ..recording import COLLECTIVE, COMPUTE, COST, EVENT, RECV, SEND, WAIT, Recording

POST, BLOCK, AWAIT = 0, 1, 2  # what an operation does to its rank: go on at once, wait at once, wait for an earlier one
UNEVEN = frozenset(("all_to_all", "gather", "scatter"))  # collectives whose members may hold different numbers of bytes


@dataclass(eq=False)
class Matching:
    """A recording with its transfers numbered. Events of all ranks stand one after the other, rank 0 first.

    Operations are the events that are not COMPUTE. `transfer[i]` is what operation i belongs to. Transfers: first messages
    that have both sides, then collectives, then messages that have one side only. `needs` counts the posts that one waits for.
    """

    world_size: int
    events: np.ndarray  # all events, of dtype EVENT
    first: np.ndarray  # where each rank's events begin; world_size + 1 values
    operations: np.ndarray  # indices of those that are not COMPUTE
    first_operation: np.ndarray  # where each rank's operations begin; world_size + 1 values
    transfer: np.ndarray  # per operation
    mode: np.ndarray  # per operation: POST, BLOCK, AWAIT
    origin: np.ndarray  # per operation: the event that posted the transfer (for AWAIT another one, else itself)
    source: np.ndarray  # per transfer: sender; lowest member of a collective
    destination: np.ndarray  # per transfer: receiver; -1 for a collective
    group: np.ndarray
    nbytes: np.ndarray
    op: np.ndarray  # per transfer: index into the recording's ops; -1 for a message
    needs: np.ndarray
    priority: np.ndarray  # per transfer: a whole number that grows with (sender, position of its post); settles ties
    messages: int  # transfers below this number are messages with both sides
    cost_event: np.ndarray  # per row of costs: its event, operator and count
    cost_operator: np.ndarray
    cost_count: np.ndarray

    @property
    def rank(self) -> np.ndarray:
        """The rank of each event."""
        return np.repeat(np.arange(self.world_size), np.diff(self.first))


def match(recording: Recording) -> Matching:
    """Pair up a recording's operations. Mismatch names both sides; ValueError says what is malformed. Kept on the recording."""
    check(recording)
    # Events can be edited in place, so what is kept is only trusted while their bytes are the same.
    stamp = tuple((zlib.crc32(e.tobytes()), zlib.crc32(c.tobytes())) for e, c in zip(recording.events, recording.costs))
    stamp += (tuple(recording.groups), tuple(recording.ops), len(recording.operators))
    kept = recording.__dict__.get("_matching")
    if kept is None or kept[0] != stamp:
        kept = recording.__dict__["_matching"] = (stamp, _match(recording))
    return kept[1]


def check(recording) -> None:
    """TypeError or ValueError unless this is a recording whose parts fit together."""
    if not isinstance(recording, Recording):
        hint = "; run(program) returns one" if callable(recording) else ""
        raise TypeError(f"The first argument must be a Recording, not {type(recording).__name__}{hint}.")
    n = recording.world_size
    if n < 1 or len(recording.events) != n or len(recording.costs) != n:
        raise ValueError(
            f"This recording says {n} ranks, but holds events of {len(recording.events)} and costs of {len(recording.costs)}."
        )
    for rank, (events, costs) in enumerate(zip(recording.events, recording.costs)):
        if getattr(events, "dtype", None) != EVENT or getattr(costs, "dtype", None) != COST:
            raise TypeError(f"The events and costs of rank {rank} must be arrays of recording.EVENT and recording.COST.")


def _match(recording: Recording) -> Matching:
    n = recording.world_size
    events = np.concatenate(recording.events)
    first = np.concatenate([[0], np.cumsum([len(e) for e in recording.events])])
    rank = np.repeat(np.arange(n), np.diff(first))
    operations = np.flatnonzero(events["kind"] != COMPUTE)
    _check_events(recording, events, rank, first, operations)

    sends, receives = _pairs(recording, events, rank)
    groups = _collectives(recording, events, rank)
    collective, instance, leader, size, most = groups
    messages = len(sends)
    alone = np.setdiff1d(operations[np.isin(events["kind"][operations], (SEND, RECV))], np.concatenate([sends, receives]))

    owner = np.full(len(events), -1)  # per event: its transfer
    owner[sends] = owner[receives] = np.arange(messages)
    owner[collective] = messages + instance
    owner[alone] = messages + len(leader) + np.arange(len(alone))
    awaits = operations[events["kind"][operations] == WAIT]
    origin = np.arange(len(events))
    origin[awaits] = first[rank[awaits]] + events["target"][awaits]
    owner[awaits] = owner[origin[awaits]]

    heads = np.concatenate([sends, leader, alone])  # the event that stands for each transfer
    mode = np.where(events["kind"] == WAIT, AWAIT, np.where(events["blocking"], BLOCK, POST))[operations]
    is_send = events["kind"][heads] == SEND
    is_collective = events["kind"][heads] == COLLECTIVE
    nbytes = events["nbytes"][heads].astype(float)
    nbytes[messages : messages + len(leader)] = most
    needs = np.full(len(heads), 2)
    needs[messages : messages + len(leader)] = size
    return Matching(
        world_size=n,
        events=events,
        first=first,
        operations=operations,
        first_operation=np.searchsorted(operations, first),
        transfer=owner[operations],
        mode=mode,
        origin=origin[operations],
        source=np.where(is_send | is_collective, rank[heads], events["peer"][heads]),
        destination=np.where(is_collective, -1, np.where(is_send, events["peer"][heads], rank[heads])),
        group=events["group"][heads],
        nbytes=nbytes,
        op=np.where(is_collective, events["op"][heads], -1),
        needs=needs,
        priority=rank[heads] * (int(np.diff(first).max(initial=0)) + 1) + heads - first[rank[heads]],
        messages=messages,
        **_costs(recording, events, rank),
    )


def _pairs(recording, events, rank) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the sends and of the receives that meet, in the same order: the k-th of each (sender, receiver, group, tag)."""
    sends, receives = (np.flatnonzero(events["kind"] == kind) for kind in (SEND, RECV))
    tag = np.unique(events["tag"], return_inverse=True)[1].astype("i8")
    place = (tag * len(recording.groups) + events["group"]) * recording.world_size
    keys = []
    for found, source, destination in ((sends, rank, events["peer"]), (receives, events["peer"], rank)):
        key = (place[found] + source[found]) * recording.world_size + destination[found]
        order = np.argsort(key, kind="stable")
        keys.append((key[order], found[order]))
    (send_key, sends), (receive_key, receives) = keys
    turn = np.arange(len(sends)) - np.searchsorted(send_key, send_key)  # k of the k-th with this key
    partner = np.searchsorted(receive_key, send_key) + turn
    meets = partner < np.searchsorted(receive_key, send_key, side="right")
    sends, receives = sends[meets], receives[partner[meets]]
    bad = np.flatnonzero(events["nbytes"][sends] != events["nbytes"][receives])
    if len(bad):
        s, r = min(((int(sends[i]), int(receives[i])) for i in bad), key=lambda pair: _position(recording, rank, pair[0]))
        raise Mismatch(
            f"A message and its buffer differ in size: rank {rank[s]} sends {events['nbytes'][s]:,} bytes to rank {rank[r]} "
            f"({_line(recording, events[s])}), which receives {events['nbytes'][r]:,} bytes ({_line(recording, events[r])}). "
            f"Give both tensors the same shape and dtype."
        )
    return sends, receives


def _collectives(recording, events, rank):
    """Collective events, the number of each one's collective, and per collective: first member's event, group size, most bytes."""
    found = np.flatnonzero(events["kind"] == COLLECTIVE)
    key = events["group"][found].astype("i8") * recording.world_size + rank[found]
    order = np.argsort(key, kind="stable")
    found, key = found[order], key[order]
    turn = np.arange(len(found)) - np.searchsorted(key, key)  # the k-th collective of this group on this rank
    collective = events["group"][found].astype("i8") * (len(events) + 1) + turn
    _, lead, instance = np.unique(collective, return_index=True, return_inverse=True)  # found is sorted by rank: lead is the lowest
    leader = found[lead]
    head = leader[instance]
    uneven = np.array([op in UNEVEN for op in recording.ops] or [False])[events["op"][found]]
    same_size = (events["nbytes"][found] == events["nbytes"][head]) | uneven
    same = (events["op"][found] == events["op"][head]) & (events["peer"][found] == events["peer"][head]) & same_size
    if not same.all():
        i = min(np.flatnonzero(~same), key=lambda i: _position(recording, rank, int(found[i])))
        raise Mismatch(_disagreement(recording, events, rank, int(head[i]), int(found[i]), int(turn[i])))
    most = np.zeros(len(leader))
    np.maximum.at(most, instance, events["nbytes"][found])
    size = np.array([len(group) for group in recording.groups] or [0])[events["group"][leader]]
    return found, instance, leader, size, most


def _disagreement(recording, events, rank, a: int, b: int, turn: int) -> str:
    def call(i):
        e = events[i]
        root = f" with root {e['peer']}" if e["peer"] >= 0 else ""
        return f"rank {rank[i]} calls {recording.ops[e['op']]} of {e['nbytes']:,} bytes{root} ({_line(recording, e)})"

    members = recording.groups[events["group"][a]]
    return (
        f"Ranks disagree about collective number {turn + 1} of the group {_some(members)}: {call(a)}, but {call(b)}. "
        f"All members must issue the same collectives in the same order, with the same size and root."
    )


def _costs(recording, events, rank) -> dict:
    """The rows of all compute events' costs, each with its event's index."""
    compute = np.flatnonzero(events["kind"] == COMPUTE)
    start = np.concatenate([[0], np.cumsum([len(c) for c in recording.costs])])
    costs = np.concatenate(recording.costs)
    length = events["last_cost"][compute] - events["first_cost"][compute]
    begin = events["first_cost"][compute] + start[rank[compute]]
    row = np.repeat(begin - np.cumsum(length) + length, length) + np.arange(int(length.sum()))
    operator, count = costs["operator"][row], costs["count"][row]
    if len(row) and (operator.min() < 0 or operator.max() >= len(recording.operators) or count.min() < 0):
        raise ValueError("A compute event names an operator that the recording does not list, or a count below 0.")
    return {"cost_event": np.repeat(compute, length), "cost_operator": operator, "cost_count": count}


# ---- malformed events ----------------------------------------------------------------------------------------------------


def _check_events(recording, events, rank, first, operations) -> None:
    kind, peer = events["kind"], events["peer"]
    message = (kind == SEND) | (kind == RECV)
    sizes = np.array([len(c) for c in recording.costs])[rank]
    target = events["target"]
    aimed = events[np.clip(first[rank] + np.clip(target, 0, None), 0, max(len(events) - 1, 0))] if len(events) else events
    member = np.zeros((len(recording.groups) + 1, recording.world_size + 1), dtype=bool)  # the spare row and column stay False
    for number, group in enumerate(recording.groups):
        if len(set(group)) != len(group) or not all(0 <= r < recording.world_size for r in group):
            raise ValueError(f"The group {_some(group)} must list different ranks from 0 to {recording.world_size - 1}.")
        member[number, list(group)] = True
    group = np.where((events["group"] >= 0) & (events["group"] < len(recording.groups)), events["group"], -1)
    other = np.where((peer >= 0) & (peer < recording.world_size), peer, -1)
    known = np.array([op in COLLECTIVES for op in recording.ops] + [False])
    op = np.where((events["op"] >= 0) & (events["op"] < len(recording.ops)), events["op"], -1)
    rules = (
        (kind > WAIT, "is of no known kind"),
        (
            (kind == COMPUTE) & ((events["first_cost"] < 0) | (events["last_cost"] < events["first_cost"])),
            "has no costs of its own",
        ),
        ((kind == COMPUTE) & (events["last_cost"] > sizes), "points past the end of the rank's costs"),
        (message & (other < 0), f"names a peer that is not a rank from 0 to {recording.world_size - 1}"),
        (message & (peer == rank), "is a message from a rank to itself: copy the tensor instead"),
        ((message | (kind == COLLECTIVE)) & (events["nbytes"] < 0), "has fewer than 0 bytes"),
        ((message | (kind == COLLECTIVE)) & ~member[group, rank], "uses a group that its rank is not a member of"),
        (message & ~member[group, other], "names a peer that is not a member of the message's group"),
        ((kind == COLLECTIVE) & ~known[op], f"is none of the collectives that replay knows: {', '.join(COLLECTIVES)}"),
        ((kind == WAIT) & ((target < 0) | (target >= np.arange(len(events)) - first[rank])), "waits for no earlier event"),
        ((kind == WAIT) & ((aimed["kind"] == COMPUTE) | (aimed["kind"] == WAIT)), "waits for an event that is no communication"),
    )
    for broken, what in rules:
        if broken.any():
            i = int(np.argmax(broken))
            raise ValueError(f"Event {i - first[rank[i]]} of rank {rank[i]} ({_line(recording, events[i])}) {what}.")


def _line(recording, event) -> str:
    return f"at {recording.lines[event['line']]}" if event["line"] >= 0 else "line not known"


def _position(recording, rank, event: int) -> int:
    return event - sum(len(e) for e in recording.events[: rank[event]])


def _some(ranks) -> str:
    shown = ", ".join(str(r) for r in ranks[:8])
    return f"[{shown}, ... {len(ranks)} ranks]" if len(ranks) > 8 else f"[{shown}]"
