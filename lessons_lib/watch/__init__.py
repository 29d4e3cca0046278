"""Watches the ranks' notes while they run: proves a mismatch or a deadlock instead of waiting for a time-out.

The launcher calls `poll` every few milliseconds. Operations are matched as gloo matches them: the k-th send from a to b
with one group and tag meets the k-th receive; the k-th collective of a group is the same one on all members.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import BufferMisuse, Deadlock, Mismatch, RunError, Wait, deadlock_message
from .complaints import dropped
from .notes import NoteReader, Operation, operation
from .rules import check_groups, check_message, disagreement, order_warning

GRACE = 0.15  # seconds for the other members to show what they bring, so that the message is the same every time
LOOKS = 3  # a deadlock must be seen as often in a row


@dataclass
class Posted:
    """An operation that a rank has issued; `partners` are the operations of the other ranks that it meets."""

    rank: int
    index: int
    operation: Operation
    clock: int = 0  # logical time at which it was issued
    partners: dict[int, Posted] = field(default_factory=dict)  # by rank; shared by the members of a collective

    def missing(self) -> list[int]:
        """The ranks whose side of the operation has not come yet."""
        op = self.operation
        if op.op in ("send", "recv"):
            return [] if self.partners else [op.peer] if op.peer >= 0 else [r for r in op.group if r != self.rank]
        return [r for r in op.group if r not in self.partners]


class Watch:
    """Follows the notes of `world_size` ranks in `folder`."""

    def __init__(self, folder: str | Path, world_size: int, shapes_only: bool = False):
        self.world_size, self.shapes_only = world_size, shapes_only
        self.warnings: list[str] = []
        self._readers = [NoteReader(folder, rank) for rank in range(world_size)]
        self._posts: list[dict[int, Posted]] = [{} for _ in range(world_size)]
        self._last: list[Posted | None] = [None] * world_size
        self._waiting: list[int | None] = [None] * world_size
        self._sends: dict[tuple, list[Posted]] = defaultdict(list)  # waiting for a receive
        self._recvs: dict[tuple, list[Posted]] = defaultdict(list)  # waiting for a send
        self._calls: list[dict[str, int]] = [defaultdict(int) for _ in range(world_size)]  # collectives so far, by group
        self._collectives: dict[tuple[str, int], dict[int, Posted]] = defaultdict(dict)
        self._groups: list[list[tuple]] = [[] for _ in range(world_size)]  # calls of new_group
        self._making: list[bool] = [False] * world_size
        self._error: RunError | None = None
        self._doubts: list[dict[int, Posted]] = []  # collectives about which ranks disagree
        self._doubted_at = 0.0  # when the first of them was seen
        self._drops: dict[int, tuple[str, str]] = {}  # rank -> the handle that it threw away: name and line
        self._drop_seen = 0.0
        self._suspicion: tuple | None = None
        self._quiet = 0  # how many looks in a row found the same ranks stuck
        self._pending: list[list[tuple]] = [[] for _ in range(world_size)]  # notes whose logical time is not known yet
        self._clocks: list[list[int]] = [[0] for _ in range(world_size)]

    # ---- what the launcher asks -----------------------------------------------------------------------------------

    def poll(self, ended: set[int] | frozenset[int] = frozenset(), final: bool = False) -> RunError | None:
        """Read what is new; the error that it proves, or None. `ended` are the ranks whose program has returned.

        `final`: nobody will ask again, so that other members have no more time to show what they bring.
        """
        news = False
        for rank, reader in enumerate(self._readers):
            for note in reader.read():
                news = True
                self._take(rank, note)
        self._tick()
        first = min((t for t in (self._doubted_at, self._drop_seen) if t), default=None)
        if self._error is None and first is not None and (final or time.monotonic() - first > GRACE):
            self._error = self._judge()
        if self._error is None and first is None and not self.shapes_only:
            self._look_for_deadlock(ended, news)
        if self._error is None and len(ended) == self.world_size:
            self._error = check_groups(self._groups, ended)
        return self._error

    def doing(self, rank: int) -> str:
        """What the rank was last seen in, for messages; "" if it has not communicated."""
        index = self._waiting[rank]
        post = self._posts[rank].get(index, self._last[rank]) if index is not None else self._last[rank]
        if post is None:
            return ""
        return f"{'waiting in' if index is not None else 'last seen in'} {post.operation} ({post.operation.where})"

    def held(self, rank: int) -> bool:
        """Whether the rank waits for something that another one has not done yet."""
        return bool(self._needs(rank)[0])

    def clock(self, rank: int, position: int) -> int:
        """Logical (Lamport) time of a rank after `position` notes; of the last known note if it is not known yet."""
        clocks = self._clocks[rank]
        return clocks[min(position, len(clocks) - 1)]

    def now(self, rank: int) -> int:
        """No line that the rank prints from here on has a smaller logical time than this."""
        return self._clocks[rank][-1]

    def known(self, rank: int, position: int) -> bool:
        """Whether `clock(rank, position)` is final."""
        return position < len(self._clocks[rank])

    def close(self) -> None:
        for reader in self._readers:
            reader.close()

    # ---- notes ----------------------------------------------------------------------------------------------------

    def _take(self, rank: int, note: list) -> None:
        kind = note[0]
        post = None
        if kind == "post":
            post = Posted(rank, note[1], operation(note[2]))
            self._posts[rank][note[1]] = self._last[rank] = post
            self._match(post)
        elif kind == "wait":
            self._waiting[rank] = note[1]
        elif kind == "done":
            self._waiting[rank] = None
            post = self._posts[rank].pop(note[1], None)
            if post is not None and post.operation.op == "recv" and post.operation.peer < 0 and note[2] is not None:
                self._resolve(post, note[2])
        elif kind == "left":
            self._waiting[rank] = None
        elif kind == "drop":
            self._drops.setdefault(rank, (note[2], note[3]))
            self._drop_seen = self._drop_seen or time.monotonic()
        elif kind == "group":
            self._groups[rank].append((tuple(note[1]), note[2]))
            self._making[rank] = True
            self._fail(check_groups(self._groups))
        elif kind == "made":
            self._making[rank] = False
        self._pending[rank].append((kind, post))

    def _fail(self, error: RunError | None) -> None:
        self._error = self._error or error

    def _match(self, post: Posted) -> None:
        op = post.operation
        if op.op in ("send", "recv"):
            if op.peer >= 0:
                self._pair(post)
            return
        seq = self._calls[post.rank][op.name]
        self._calls[post.rank][op.name] += 1
        members = self._collectives[op.name, seq]
        members[post.rank] = post
        if disagreement(members) and not any(doubt is members for doubt in self._doubts):
            self._doubted_at = self._doubted_at or time.monotonic()
            self._doubts.append(members)
        post.partners = members
        if len(members) == len(op.group):
            del self._collectives[op.name, seq]
            warning = order_warning([members[r] for r in sorted(members)])
            if warning and warning not in self.warnings:
                self.warnings.append(warning)

    def _judge(self) -> RunError | None:
        """What to say about misuse that the notes show: the same, whichever rank came first."""
        if self._doubts:
            return disagreement(min(self._doubts, key=min))  # of the group with the lowest rank
        if self._drops:
            rank = min(self._drops)
            return BufferMisuse(dropped(rank, *self._drops[rank]))
        return None

    def _pair(self, post: Posted) -> None:
        op, here = post.operation, post.operation.op == "send"
        key = (op.name, *((post.rank, op.peer) if here else (op.peer, post.rank)), op.tag)
        mine, theirs = (self._sends, self._recvs) if here else (self._recvs, self._sends)
        if not theirs[key]:
            mine[key].append(post)
            return
        other = theirs[key].pop(0)
        post.partners, other.partners = {other.rank: other}, {post.rank: post}
        self._fail(check_message(*((post, other) if here else (other, post))))

    def _resolve(self, post: Posted, source: int) -> None:
        """A receive from any rank took a message of `source`: the oldest one that no other receive has taken."""
        op = post.operation
        waiting = self._sends[op.name, source, post.rank, op.tag]
        if waiting:
            other = waiting.pop(0)
            post.partners, other.partners = {source: other}, {post.rank: post}
            self._fail(check_message(other, post))

    # ---- logical time: prints of different ranks are put in order by it ---------------------------------------------

    def _tick(self) -> None:
        moved = True
        while moved:
            moved = False
            for rank, pending in enumerate(self._pending):
                while pending and self._tick_one(rank, *pending[0]):
                    pending.pop(0)
                    moved = True

    def _tick_one(self, rank: int, kind: str, post: Posted | None) -> bool:
        now = self._clocks[rank][-1] + 1
        if kind == "post":
            post.clock = now
        elif kind == "done" and post is not None and not self.shapes_only:
            if post.missing() or any(not p.clock for p in post.partners.values()):
                return False  # the other side's note is on its way
            now = max([now, *[p.clock + 1 for p in post.partners.values()]])
        self._clocks[rank].append(now)
        return True

    # ---- deadlock ---------------------------------------------------------------------------------------------------

    def _needs(self, rank: int) -> tuple[list[int], bool, Wait | None]:
        """Whom the rank waits for, whether any one of them would do, and the words for it."""
        index = self._waiting[rank]
        if index is not None and index in self._posts[rank]:
            post = self._posts[rank][index]
            op, needs = post.operation, post.missing()
            if op.op == "send" and needs and self._open_receive(post):
                needs = []
            wait = Wait(rank, str(op), op.where, tuple(needs), _counterpart(op, rank), op.op == "send")
            return needs, op.peer < 0 and op.op == "recv", wait
        if self._making[rank]:
            turn = len(self._groups[rank])
            ranks, line = self._groups[rank][-1]
            needs = [r for r in ranks if len(self._groups[r]) < turn] if rank in ranks else []
            call = f"new_group({list(ranks)})"
            return needs, False, Wait(rank, call, line, tuple(needs), call)
        return [], False, None

    def _open_receive(self, send: Posted) -> bool:
        """Whether the receiver has a receive from any rank open, which may take this message."""
        op = send.operation
        return any(
            p.operation.op == "recv" and p.operation.peer < 0 and p.operation.tag == op.tag and p.operation.name == op.name
            for p in self._posts[op.peer].values()
        )

    def _look_for_deadlock(self, ended, news: bool) -> None:
        needs = {r: n for r in range(self.world_size) if r not in ended and (n := self._needs(r))[0]}
        stuck = set(needs)
        while True:
            gone = stuck | set(ended)
            free = {r for r in stuck if not (all if needs[r][1] else any)(n in gone for n in needs[r][0])}
            if not free:
                break
            stuck -= free
        positions = tuple(len(c) + len(p) for c, p in zip(self._clocks, self._pending))
        suspicion = (frozenset(stuck), frozenset(ended), positions) if stuck else None
        self._quiet = self._quiet + 1 if suspicion is not None and suspicion == self._suspicion and not news else 0
        if self._quiet >= LOOKS:
            waits = [needs[r][2] for r in sorted(stuck)]
            partial = next((w for w in waits if w.what.startswith("new_group")), None)
            self._error = Mismatch(partial_group_message(partial)) if partial else Deadlock(deadlock_message(waits, set(ended)))
        self._suspicion = suspicion


def _counterpart(op: Operation, rank: int) -> str:
    if op.op == "send":
        return f"a recv from rank {rank} on rank {op.peer}"
    if op.op == "recv":
        return f"a send to rank {rank}" + (f" on rank {op.peer}" if op.peer >= 0 else "")
    return f"{op.op} on every member"


def partial_group_message(wait: Wait) -> str:
    missing = ", ".join(map(str, wait.needs))
    return (
        f"Rank {wait.rank} called {wait.what} ({wait.line}), but rank {missing} did not. Every rank must call new_group, with "
        "the same list of ranks and in the same order, also ranks that are not members. Move the call out of the `if`."
    )
