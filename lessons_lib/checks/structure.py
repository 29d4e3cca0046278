"""What an answer did, from its recording: messages, bytes, steps, peers. Never the clock of this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from ..hardware import Cluster, Device, Link
from ..recording import COLLECTIVE, RECV, SEND, Recording
from ..replay import replay
from .trial import Case

Messages = Sequence[tuple[int, int]]  # of one rank, in order: (peer, bytes)


def sends(recording: Recording, rank: int) -> list[tuple[int, int]]:
    """The messages that a rank sent, in the order of its program: (to whom, bytes)."""
    return _messages(recording, rank, SEND)


def receives(recording: Recording, rank: int) -> list[tuple[int, int]]:
    """The receives that a rank posted: (from whom, bytes); -1: from any rank."""
    return _messages(recording, rank, RECV)


def _messages(recording: Recording, rank: int, kind: int) -> list[tuple[int, int]]:
    events = recording.events[rank]
    chosen = events[events["kind"] == kind]
    return list(zip(chosen["peer"].tolist(), chosen["nbytes"].tolist()))


def steps(recording: Recording) -> int:
    """How many messages follow one another on the longest path: the replay where a message takes 1 s and nothing else any time.

    Every rank has one port to send and one to receive, so two messages out of one rank are two steps.
    """
    free = Device(flops=1e30, memory=1e30, memory_bandwidth=1e30, efficiency=1.0)
    cluster = Cluster(free, devices_per_node=recording.world_size, intra_node=Link(1e30, 1.0))
    return round(replay(recording, cluster).step_time)


def expect_by_hand(case: Case) -> None:
    """The answer uses send and receive of its own, neither a collective nor the finished code of lessons_lib.parallel."""
    used = sorted({row[0] for row in case.recording.collectives})
    if used:
        raise case.wrong(
            f"Your code calls dist.{used[0]}. In this exercise everything is built from send and receive: "
            "dist.send, dist.recv, dist.isend, dist.irecv, dist.batch_isend_irecv."
        )
    expect_own_code(case)


def expect_own_code(case: Case) -> None:
    """What the answer sends does not come from the finished code of lessons_lib.parallel; collectives are welcome."""
    finished = [line for line in case.recording.lines if line.split(",")[0] in _finished_files()]
    if finished:
        raise case.wrong(f"The messages come from the course's finished code ({finished[0]}): write them yourself.")


@lru_cache(maxsize=1)
def _finished_files() -> frozenset[str]:
    return frozenset(path.name for path in (Path(__file__).parents[1] / "parallel").glob("*.py"))


def expect_sends(case: Case, expected: Sequence[Messages], explain: Callable[[int], str] | None = None) -> None:
    """Every rank sent exactly the expected messages, in any order; else Wrong.

    `explain(rank)` is a sentence about the mistake that gives the traffic of this rank, or "".
    """
    expect_by_hand(case)
    for rank, wanted in enumerate(expected):
        sent = sends(case.recording, rank)
        if sorted(sent) == sorted(wanted):
            continue
        raise case.wrong(
            f"The values are right, the way is not: rank {rank} sent {traffic(sent)}; expected was {traffic(wanted)}.",
            (explain(rank) if explain else "") or _compared(sent, wanted),
        )


def _compared(sent: Messages, wanted: Messages) -> str:
    strangers = sorted({peer for peer, _ in sent} - {peer for peer, _ in wanted})
    if strangers and wanted:
        return f"Nothing needs to go from this rank to rank {strangers[0]}."
    more, enough = sum(n for _, n in sent), sum(n for _, n in wanted)
    if more > enough and enough:
        return f"That is {more / enough:.3g} times the bytes that are needed."
    return ""


def expect_steps(case: Case, most: int, advice: str) -> int:
    """The messages follow one another in at most `most` steps; returns how many they took."""
    taken = steps(case.recording)
    if taken > most:
        raise case.wrong(
            f"Values and messages are right, but they take {taken} steps one after the other; {most} are enough.", advice
        )
    return taken


def traffic(messages: Messages) -> str:
    """Messages in words: "3 messages to rank 2 (120 bytes)"."""
    if not messages:
        return "no message"
    peers = list(dict.fromkeys(peer for peer, _ in messages))
    parts = []
    for peer in peers[:4]:
        sizes = [nbytes for other, nbytes in messages if other == peer]
        parts.append(f"{count(len(sizes), 'message')} to rank {peer} ({sum(sizes):,} bytes)")
    return ", ".join(parts) + (f" and {count(len(peers) - 4, 'more rank')}" if len(peers) > 4 else "")


def count(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def network_bytes(recording: Recording, per_node: int) -> np.ndarray:
    """Bytes that each rank sent to other nodes, of `per_node` ranks each."""
    node = np.arange(recording.world_size) // per_node
    return (recording.sent_bytes * (node[:, None] != node[None, :])).sum(axis=1)


# ---- collectives ------------------------------------------------------------------------------------------------------

_SHARE = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}  # x (n-1)/n x bytes: what a rank sends


def calls(recording: Recording, rank: int, label: str | None = None) -> list[tuple[str, int]]:
    """The collectives of a rank in the order of its program: (name, bytes of the full buffer). `label`: those inside it alone.

    With trial.run(..., upstream=...) the labels are "forward" and "backward".
    """
    events = recording.events[rank]
    chosen = events[events["kind"] == COLLECTIVE]
    if label is not None:
        chosen = chosen[chosen["label"] == (recording.labels.index(label) if label in recording.labels else -2)]
    return [(recording.ops[op], int(nbytes)) for op, nbytes in zip(chosen["op"], chosen["nbytes"])]


def bytes_sent(recording: Recording, rank: int) -> float:
    """What a rank sends: its messages, and for each collective the bytes of a ring; a broadcast or a reduce counts once."""
    total = float(sum(nbytes for _, nbytes in sends(recording, rank)))
    n = recording.world_size
    for op, nbytes in calls(recording, rank):
        total += _SHARE[op] * (n - 1) / n * nbytes if op in _SHARE else nbytes if n > 1 else 0
    return total


def expect_calls(case: Case, expected: Sequence[tuple[str, int]], advice: str = "", label: str | None = None) -> None:
    """Every rank issued these collectives, (name, bytes of the full buffer), in any order, and sent no message; else Wrong."""
    expect_own_code(case)
    where = {"forward": " forward", "backward": " backward"}.get(label, "")
    for rank in case.active:
        made = calls(case.recording, rank, label)
        if sorted(made) != sorted(expected):
            raise case.wrong(
                f"The numbers are right, the way is not: rank {rank} called {said(made)}{where}; expected was {said(expected)}.",
                advice,
            )
        if sends(case.recording, rank):
            raise case.wrong(f"The numbers are right, but rank {rank} also sent {traffic(sends(case.recording, rank))}.", advice)


def expect_bytes(case: Case, most: float, explain: Callable[[int], str] | None = None) -> None:
    """No rank sent more than `most` bytes, counted as `bytes_sent` does; else Wrong. `explain(rank)`: what sends so much."""
    expect_own_code(case)
    for rank in case.active:
        sent = bytes_sent(case.recording, rank)
        if sent > most:
            raise case.wrong(
                f"The numbers are right, the way is not: rank {rank} sent {sent:,.0f} bytes; {most:,.0f} are enough. It called "
                f"{said(calls(case.recording, rank))}.",
                explain(rank) if explain else "",
            )


def said(made: Sequence[tuple[str, int]]) -> str:
    """Collectives in words: "all_reduce twice (40 and 8 bytes)"."""
    if not made:
        return "no collective"
    parts = []
    for op in dict.fromkeys(op for op, _ in made):
        sizes = [nbytes for other, nbytes in made if other == op]
        times = "" if len(sizes) == 1 else " twice" if len(sizes) == 2 else f" {len(sizes)} times"
        shown = ", ".join(f"{n:,}" for n in sizes) + " bytes" if len(sizes) <= 3 else f"{sum(sizes):,} bytes in all"
        if len(sizes) > 1 and len(set(sizes)) == 1:
            shown = f"{sizes[0]:,} bytes each"
        parts.append(f"{op}{times} ({shown})")
    return ", ".join(parts)
