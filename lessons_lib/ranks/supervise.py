"""Watches the ranks of one run from the launcher: shows what they print, learns how each ends, knows when to give up."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..errors import RankFailed, RunError
from ..recording import Recording
from ..watch import Watch
from . import failures, launch, sending, tracebacks
from .failures import Failure
from .printing import MESSAGE, OTHER, Allowance, Assembler, Order, hold_seconds, show

_TICK = 0.02  # seconds between two looks at the notes
_AFTERMATH = 0.3  # seconds in which other ranks may fail too, after the first
_SLOW_START = 3.0  # seconds after which a learner is told why nothing happens
_START_LIMIT = 180.0  # seconds for a fresh Python to load torch from a cold disk
_END = 1 << 62  # a position after all others
_ANSWER = 1.0  # seconds in which a rank must say where it is


@dataclass
class Rank:
    """What the launcher knows of one rank."""

    number: int
    assembler: Assembler
    process: launch.Process | None = None
    phase: str = "not started"  # -> "starting" -> "ready" -> "running" -> "returned" -> "done", or "failed"
    unplaced: list[tuple[int, str, float]] = field(default_factory=list)  # lines whose logical time is not known yet
    allowance: Allowance = field(default_factory=Allowance)
    stack: tuple[str, str] | None = None
    last_words: list[str] = field(default_factory=list)
    drained: bool = True

    @property
    def over(self) -> bool:
        return self.phase in ("done", "failed")


class Supervisor:
    """One run from start to end. `settings` is what the ranks are told (see child.py); `folder` belongs to this run."""

    def __init__(self, folder: str, world_size: int, settings: dict, timeout: float | None):
        self.folder, self.world_size, self.timeout = Path(folder), world_size, timeout
        self.shapes_only = settings["shapes_only"]
        self.at_once = min(world_size, os.cpu_count() or 1) if self.shapes_only else world_size
        token = os.urandom(8)
        self.watch = Watch(folder, world_size, shapes_only=self.shapes_only)
        self.order = Order(world_size)
        self.ranks = [Rank(n, Assembler(token)) for n in range(world_size)]
        self.processes = launch.group(folder, token)
        self.failures: dict[int, Failure] = {}
        self.failed_after: dict[int, int] = {}  # rank -> how many notes it had written when it failed
        self.proof: RunError | None = None
        self.origin: float | None = None  # perf_counter when the programs were let go
        self.failed_at: float | None = None
        self.looked = 0.0
        self.told = False
        self.hold = hold_seconds()

    # ---- the whole run -------------------------------------------------------------------------------------------------

    def run(self) -> Recording:
        """Raises a RunError if the program fails; KeyboardInterrupt passes through."""
        begun = time.monotonic()
        self._start_more()
        while not all(rank.phase == "done" for rank in self.ranks):
            self.step()
            self._start_more()
            now = time.monotonic()
            if self.failed_at is not None:
                if now > self.failed_at or self._nobody_else_can_fail():
                    raise self._conclusion()
            elif self.proof is not None:
                raise failures.explain([], self.proof, self.world_size)
            elif self.origin is None and now - begun > _SLOW_START and not self.told:
                self._tell_slow_start()
            elif self.origin is None and now - begun > _START_LIMIT:
                raise RankFailed(f"the ranks did not start within {_START_LIMIT:g} s: is this machine out of memory, or very busy?")
            elif self.timeout is not None and self.origin is not None and time.perf_counter() - self.origin > self.timeout:
                raise self._too_late()
        self.step()
        return self._recording()

    def _tell_slow_start(self) -> None:
        """Only to a reader who waits: with LESSONS_HOLD_SECONDS set, outputs are being stored or compared."""
        self.told = True
        if "LESSONS_HOLD_SECONDS" not in os.environ:
            stream = sys.stdout if "ipykernel" in sys.modules else sys.stderr  # a Lab shows stderr as if it were an error
            ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
            stream.write(f"Starting {ranks}: torch is being loaded, 5-10 s the first time ...\n")
            stream.flush()

    def close(self) -> None:
        """No rank outlives this; what they printed is shown."""
        try:
            launch.stop(self.processes)
            self.flush()
        finally:
            launch.give_back(self.processes)
            self.watch.close()

    def _recording(self) -> Recording:
        logs, results = [], []
        for rank in range(self.world_size):
            try:
                log, result = sending.read_result(str(self.folder / f"result.{rank}"))
            except Exception as error:
                raise RankFailed(failures.unreadable(rank, tracebacks.summary(error))) from None
            logs.append(log)
            results.append(result)
        self.flush()
        self._look(final=True)
        if self.proof is not None:
            raise self.proof
        for text in self.watch.warnings:
            failures.warn_of_order(text)
        return Recording.from_logs(
            logs, results=results, output=self.order.output(), warnings=list(self.watch.warnings), shapes_only=self.shapes_only
        )

    # ---- one round -----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Wait for news, at most a tick; take it in; show the lines that may be shown."""
        self._wait()
        if time.monotonic() - self.looked >= _TICK / 2:
            self.looked = time.monotonic()
            self._look()
        # Before reading: a line that a rank printed before it took these notes is then among what is read below.
        bounds = {rank.number: self._bound(rank.number) for rank in self.ranks if not rank.over}
        self._drain()
        self._deaths()
        if any(rank.unplaced for rank in self.ranks):
            self._look()
        self._place()
        for rank in self.ranks:
            if rank.unplaced:
                bounds.setdefault(rank.number, self._bound(rank.number))
            if not rank.drained:
                bounds[rank.number] = 0  # not before its last line, that is
        show(self.order.release(bounds, held_since=time.monotonic() - self.hold))

    def flush(self) -> None:
        """Show everything that is still held."""
        self._drain(final=True)
        self._place(everything=True)
        show(self.order.release({}, held_since=time.monotonic()))

    def _wait(self) -> None:
        if os.name != "posix":
            time.sleep(0.005)
            return
        fds = [r.process.output for r in self.ranks if r.process is not None and r.process.status is None]
        poll = select.poll()
        for fd in fds + self.processes.filenos():
            poll.register(fd, select.POLLIN)
        poll.poll(_TICK * 1000)

    def _look(self, final: bool = False) -> None:
        ended = {r.number for r in self.ranks if r.phase in ("returned", "done")}
        self.proof = self.proof or self.watch.poll(ended, final)

    def _bound(self, rank: int) -> int:
        return rank if self.shapes_only else self.watch.now(rank)

    def _place(self, everything: bool = False) -> None:
        """Give lines their logical time, in the order in which their rank printed them."""
        late = time.monotonic() - self.hold
        for rank in self.ranks:
            while rank.unplaced:
                position, line, arrival = rank.unplaced[0]
                if not (self.shapes_only or everything or arrival < late or self.watch.known(rank.number, position)):
                    break
                rank.unplaced.pop(0)
                clock = rank.number if self.shapes_only else self.watch.clock(rank.number, position)
                self.order.add(rank.number, clock, line, arrival)

    def _drain(self, final: bool = False) -> None:
        for rank in self.ranks:
            if rank.process is None:
                continue
            data, rank.drained = rank.process.read() if rank.process.output is not None else (b"", True)
            for stream, position, line in rank.assembler.feed(data, final):
                if stream == MESSAGE:
                    self._message(rank, json.loads(line))
                elif stream == OTHER and (rank.last_words or line.startswith("terminate called")):
                    rank.last_words.append(line)  # C++ gives up: part of the error, not of the program's output
                elif rank.allowance.admits(line):
                    rank.unplaced.append((position, line, time.monotonic()))
            if final and rank.allowance.left_out:
                rank.unplaced.append((_END, rank.allowance.notice(), time.monotonic()))

    def _start_more(self) -> None:
        if self.failures:
            return
        busy = sum(rank.process is not None and rank.process.status is None for rank in self.ranks)
        for rank in self.ranks:
            if rank.process is None and busy < self.at_once:
                rank.process = self.processes.start(rank.number)
                rank.phase = "starting"
                rank.process.order(rank=rank.number, folder=str(self.folder))
                busy += 1

    def _message(self, rank: Rank, content: dict) -> None:
        kind = content.pop("is")
        if kind == "ready":
            rank.phase = "ready"
            self._let_go()
        elif kind == "stack":
            rank.stack = (content["place"], content["text"])
        elif kind == "failed":
            rank.phase = "failed"
            self.failed_after[rank.number] = content.pop("position")
            self._fail(Failure(rank.number, **content))
        else:
            rank.phase = kind

    def _let_go(self) -> None:
        """All ranks are ready: their clocks start at the same moment. Without data, none waits for another."""
        ready = [rank for rank in self.ranks if rank.phase == "ready"]
        if not self.shapes_only and len(ready) < self.world_size:
            return
        self.origin = self.origin or time.perf_counter()
        for rank in ready:
            rank.phase = "running"
            rank.process.order(start=self.origin)

    def _fail(self, failure: Failure) -> None:
        self.failures.setdefault(failure.rank, failure)
        if self.failed_at is None:
            self.failed_at = time.monotonic() + max(_AFTERMATH, min(self.hold - 1, 3.0))

    def _deaths(self) -> None:
        self.processes.poll()
        if self.processes.broken:
            raise RankFailed(f"the process that starts the ranks ended: {self.processes.broken}")
        for rank in self.ranks:
            if rank.process is None or rank.process.status is None or rank.over:
                continue
            self._drain()  # its last words
            if not rank.over:
                rank.phase = "failed"
                doing, place = self.watch.doing(rank.number), self._stack_in(f"crash.{rank.number}")[0]
                words = "\n".join(rank.last_words)[:2000]
                self._fail(failures.died(rank.number, rank.process.status, doing, place, words))

    # ---- the end, when it is not a good one ---------------------------------------------------------------------------

    def _nobody_else_can_fail(self) -> bool:
        """Whoever waits for a rank that has not come stays there; who waits while all have come goes on, and may fail."""
        self._look()
        return all(r.over or r.process is None or self.watch.held(r.number) for r in self.ranks)

    def _conclusion(self) -> RunError:
        self._look(final=True)  # by now the notes of what came before are there, so that the logical times are final
        for rank, position in self.failed_after.items():
            self.failures[rank] = replace(self.failures[rank], clock=self.watch.clock(rank, position))
        return failures.explain(self.failures.values(), self.proof, self.world_size)

    def _too_late(self) -> RunError:
        """The time is over: ask every rank where it is, first its Python, then the signal that works while C code runs."""
        late = [rank for rank in self.ranks if not rank.over]
        for rank in late:
            if rank.process is not None:
                rank.process.order(stack=1)
        limit = time.monotonic() + _ANSWER
        while time.monotonic() < limit and any(r.stack is None and r.process is not None and not r.over for r in late):
            self.step()
        silent = [r for r in late if r.stack is None and r.process is not None and r.process.pid]
        if silent and hasattr(signal, "SIGUSR1"):
            for rank in silent:
                if rank.process.status is None:
                    os.kill(rank.process.pid, signal.SIGUSR1)
            time.sleep(0.2)
        stacks = {r.number: r.stack or self._stack_in(f"stack.{r.number}") for r in late}
        doing = {r.number: self.watch.doing(r.number) for r in late}
        return failures.timed_out(self.timeout, stacks, doing, self.world_size - len(late))

    def _stack_in(self, name: str) -> tuple[str, str]:
        try:
            text = (self.folder / name).read_text(errors="replace")
        except OSError:
            return "", ""
        stack = tracebacks.of_faulthandler(text)
        return tracebacks.place(stack), tracebacks.stack_text(stack)
