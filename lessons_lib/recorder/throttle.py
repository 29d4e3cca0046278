"""Makes messages take a link's time on the wall clock, on any system and without root.

Gloo moves the bytes over loopback as fast as it can; a wait then lasts until the link that was asked for would have
delivered them. When that is follows the rules of the replay: a message is ready when both sides have posted it, starts
when the sender's send port and the receiver's receive port are free, and takes latency + bytes / bandwidth. The ranks
keep the state of the ports in one small shared file under a lock; whoever looks at it brings it up to date.
"""

from __future__ import annotations

import pickle
import threading
import time
from pathlib import Path

import torch

from ..formulas import collective_time
from ..hardware import LAPTOP, Cluster

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None
    import msvcrt


class _Locked:
    """The shared state, read under a lock and written back on leaving."""

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self) -> dict:
        self.file = open(self.path, "r+b", buffering=0)
        if fcntl:
            fcntl.flock(self.file, fcntl.LOCK_EX)
        else:
            while True:
                try:
                    msvcrt.locking(self.file.fileno(), msvcrt.LK_LOCK, 1)
                    break
                except OSError:
                    time.sleep(0.001)
        data = self.file.read()
        self.state = pickle.loads(data) if data else {"posted": {}, "ready": [], "free": {}, "ended": {}}
        return self.state

    def __exit__(self, *exc) -> None:
        self.file.seek(0)
        self.file.write(pickle.dumps(self.state))
        self.file.truncate()
        if not fcntl:
            self.file.seek(0)
            msvcrt.locking(self.file.fileno(), msvcrt.LK_UNLCK, 1)
        self.file.close()  # also gives the lock back


def advance(state: dict, now: float) -> None:
    """Start every transfer that could have started by `now`: ready, and all its ports free; who was ready first goes first."""
    ready, free = state["ready"], state["free"]
    while True:
        best = None
        for transfer in ready:  # (ready at, order, key, ports, seconds)
            start = max(transfer[0], *(free.get(port, 0.0) for port in transfer[3]), 0.0)
            if best is None or (start, *transfer[:2]) < best[0]:
                best = (start, *transfer[:2]), transfer
        if best is None or best[0][0] > now:
            return
        (start, *_), transfer = best
        ready.remove(transfer)
        for port in transfer[3]:
            free[port] = start + transfer[4]
        state["ended"][transfer[2]] = start + transfer[4]


class Wire:
    """One rank's end of the throttled link. A ticket names a transfer; all its members hold the same one."""

    def __init__(self, folder: str | Path, rank: int, world_size: int, link):
        self.rank, self.link, self.path = rank, link, Path(folder) / "wire"
        self.path.touch()
        self.cluster = Cluster(LAPTOP, nodes=1, devices_per_node=world_size, intra_node=link)
        self._ends: dict = {}
        self._turns: dict = {}

    def transfer(self, op: str, group, peer: int, tag: int, nbytes: int) -> tuple:
        """Post this rank's side of the next message or collective of its kind; its ticket."""
        if op in ("send", "recv"):
            if peer < 0:
                raise ValueError("with throttle=..., dist.recv must name the rank it receives from: recv(tensor, src=...)")
            source, destination = (self.rank, peer) if op == "send" else (peer, self.rank)
            channel = (group.label, source, destination, tag)
            members, seconds = (source, destination), self.link.latency + nbytes / self.link.bandwidth
            ports = (("send", source), ("recv", destination))
            turn = self._turns[op, channel] = self._turns.get((op, channel), 0) + 1
        else:
            channel, members = (group.label,), group.ranks
            seconds = collective_time(op, nbytes, range(len(members)), self.cluster)
            ports = tuple((side, rank) for rank in members for side in ("send", "recv"))
            turn = self._turns[channel] = self._turns.get(channel, 0) + 1
        return self.post((*channel, turn), members, seconds, ports)

    def post(self, ticket: tuple, members: tuple[int, ...], seconds: float, ports: tuple) -> tuple:
        """This rank's side of a transfer is there; it is ready once all `members` have posted it."""
        with _Locked(self.path) as state:
            now = time.perf_counter()
            advance(state, now)
            here = state["posted"].setdefault(ticket, set())
            here.add(self.rank)
            if len(here) == len(set(members)):
                del state["posted"][ticket]
                state["ready"].append((now, (min(members), str(ticket)), ticket, ports, seconds))
                advance(state, now)
        return ticket

    def _end(self, ticket: tuple) -> float | None:
        """When the transfer ends, or None while that is not known (it is not ready, or a port is busy)."""
        if ticket not in self._ends:
            with _Locked(self.path) as state:
                advance(state, time.perf_counter())
                if ticket not in state["ended"]:
                    return None
                self._ends[ticket] = state["ended"][ticket]
                old = [t for t, end in state["ended"].items() if end < self._ends[ticket] - 60]
                for t in old:
                    del state["ended"][t]
        return self._ends[ticket]

    def is_done(self, ticket: tuple) -> bool:
        end = self._end(ticket)
        return end is not None and time.perf_counter() >= end

    def sleep_until_done(self, ticket: tuple) -> None:
        while (end := self._end(ticket)) is None:
            time.sleep(0.0005)
        while (left := end - time.perf_counter()) > 0:
            time.sleep(left if left < 0.001 else left - 0.0005)
        self._ends.pop(ticket, None)

    def future(self, handle):
        """A future that completes when the link has delivered, for C++ code that waits on it (DDP)."""
        future, inner = torch.futures.Future(), handle.inner

        def complete():
            inner.wait()
            while not self.is_done(handle.ticket):
                time.sleep(0.0005)
            future.set_result(inner.result())

        threading.Thread(target=complete, daemon=True).start()
        return future
