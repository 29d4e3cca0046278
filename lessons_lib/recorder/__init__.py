"""Records what one rank does: operators between communications, every message and collective, every wait.

`Recorder.start()` initialises torch.distributed with a process group that runs gloo underneath and notes each operation
before it starts; `finish()` hands back the rank's log. The program itself is plain torch.distributed.
"""

from __future__ import annotations

import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ..errors import BufferMisuse, RunError
from ..recording import EVENT, RankLog
from ..sources import describe, is_user_code
from ..watch import complaints
from ..watch.notes import NoteWriter, Operation
from .callers import calling_line
from .flight import Flight, watch_reads, written_by
from .handles import Handle
from .operators import OperatorCounter, tensors_in
from .pieces import check_dense

FOREVER = timedelta(days=7)  # the launcher proves deadlocks and keeps the time limit; gloo's own must not come first
COLUMNS = EVENT.names


class Recorder:
    """Everything one rank notes."""

    def __init__(self, rank, world_size, folder, shapes_only=False, throttle=None):
        self.rank, self.world_size, self.folder, self.shapes_only = rank, world_size, Path(folder), shapes_only
        self.origin = time.perf_counter()
        self.log = RankLog(rank, world_size)
        self.notes = NoteWriter(folder, rank)
        self.flight = Flight()
        self.wire = None
        if throttle is not None:
            from .throttle import Wire

            self.wire = Wire(folder, rank, world_size, throttle)
        self._ran: dict[int, int] = {}  # what ran since the last event: number of the operator -> count
        self._since = 0.0
        self._numbers: dict[int, int] = {}
        self._labels: list[str] = []
        self._library: dict[int, Handle] = {}  # not waited for yet, and held inside a library
        self._unwaited: dict[int, tuple[str, str]] = {}  # what the program itself must wait for: name and line
        self._dropped = ""
        self._modes: list = []
        self._over = False

    @property
    def position(self) -> int:
        """How many notes this rank has written."""
        return self.notes.position

    def now(self) -> float:
        return time.perf_counter() - self.origin

    # ---- beginning and end ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Initialise torch.distributed; everything on this thread is recorded from here on."""
        from . import group

        group.install(self)
        # older names work and are recorded; which name is today's is not this program's problem
        warnings.filterwarnings("ignore", r".?torch\.distributed\..* is deprecated", FutureWarning)
        store = dist.HashStore() if self.shapes_only else dist.FileStore(str(self.folder / "store"), self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size, timeout=FOREVER)
        if not self.shapes_only:
            self._start_clock_together()
        self.counter = OperatorCounter(self._count, self._enter, self._leave)
        if self.shapes_only:
            from torch._subclasses.fake_tensor import FakeTensorMode

            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # copy.deepcopy of a module does

            from .functional import FunctionalCollectives, allow_conversions, keep_meshes_real

            self._modes.append(FakeTensorMode(allow_non_fake_inputs=True))
            self.counter.explain = self._explain
            self.counter.functional = FunctionalCollectives(self)
            keep_meshes_real()
            allow_conversions()
        self._modes.append(self.counter)
        watch_reads(lambda tensor, how: self._look([tensor], [], None, how))
        for mode in self._modes:
            mode.__enter__()
        self._since = self.now()

    def _start_clock_together(self) -> None:
        """Time 0 is when the last rank was ready: the clock is the same for all processes of a machine."""
        latest = torch.tensor([time.perf_counter()], dtype=torch.float64)
        dist.group.WORLD.inner.allreduce(latest, dist.ReduceOp.MAX).wait()
        self.origin = latest.item()

    def finish(self) -> RankLog:
        """The rank's log. BufferMisuse if the program ended before it waited for what it started."""
        for handle in list(self._library.values()):
            handle.wait()
        self._flush()
        self._close()
        if self._dropped:
            raise BufferMisuse(self._dropped)
        if self._unwaited:
            raise BufferMisuse(complaints.never_waited(self.rank, list(self._unwaited.values())))
        return self.log

    def better(self, error: BaseException) -> BaseException:
        """What to tell instead of an error whose words do not help here."""
        try:
            text = str(error)
        except Exception:  # an exception class of the program, and its __str__ fails
            return error
        if "initialize the default process group twice" in text:
            return ValueError(complaints.INITIALISED_TWICE)
        if self.shapes_only and any(known in text for known in complaints.NO_DATA):
            return RunError(complaints.no_data(self.rank, self._line_of(error), text.partition("\n")[0]))
        return error

    def _line_of(self, error: BaseException) -> str:
        """The program's own line that an error came from."""
        where, step = "the program", error.__traceback__
        while step is not None:
            if is_user_code(step.tb_frame.f_code.co_filename):
                where = describe(step.tb_frame.f_code.co_filename, step.tb_lineno)
            step = step.tb_next
        return where

    def abandon(self) -> None:
        """The program failed: no complaints about what it left open."""
        self._close()

    def _close(self) -> None:
        self._over = True
        while self._modes:
            self._modes.pop().__exit__(None, None, None)

    # ---- computing --------------------------------------------------------------------------------------------------

    def _count(self, operator) -> None:
        number = self._numbers.get(id(operator))
        if number is None:
            number = self._numbers[id(operator)] = self.log.index("operators", operator)
        self._ran[number] = self._ran.get(number, 0) + 1

    def _enter(self, label: str) -> None:
        self._flush()
        self._labels.append(str(label))

    def _leave(self) -> None:
        self._flush()
        if self._labels:
            self._labels.pop()

    def _label(self) -> str:
        return self._labels[-1] if self._labels else ""

    def _flush(self) -> float:
        """Close the stretch of computing that ran until now."""
        now = self.now()
        if self._ran:
            self.log.compute_many(self._ran, label=self._label(), start=self._since, end=now)
            self._ran = {}
        self._since = now
        return now

    def _explain(self, func, error: Exception) -> Exception | None:
        """Why an operator cannot work without data; None if that is not the reason."""
        if type(error).__name__ in complaints.NEEDS_DATA:
            return RunError(complaints.no_data(self.rank, calling_line()[0], func._overloadpacket.__name__))
        return None

    # ---- communicating ----------------------------------------------------------------------------------------------

    def post(self, op, group, reads, writes, numel, nbytes, issue, peer=-1, tag=0, reduce="", splits=()) -> Handle:
        """Note an operation, start it with `issue()`, and return its handle.

        `reads` and `writes` are its tensors; `numel` counts the elements that must agree between ranks; `nbytes` is the
        message, or the full buffer of the collective; `peer` is a global rank: the other side, or the root.
        """
        where, direct, name = calling_line()
        name = name or op
        if self._dropped:
            raise BufferMisuse(self._dropped)
        check_dense(self.rank, name, (*reads, *writes), where)
        self._look(reads, writes, where, name)
        start = self._flush()
        tensor = next(iter((*reads, *writes)), None)
        shape, dtype = (tuple(tensor.shape), str(tensor.dtype)[6:]) if tensor is not None else ((), "")
        event = {
            "blocking": False,
            "group": group.ranks,
            "name": group.alias,
            "tag": tag,
            "label": self._label(),
            "line": where,
            "start": start,
        }
        if op in ("send", "recv"):
            index = (self.log.send if op == "send" else self.log.recv)(peer, nbytes, **event)
        else:
            index = self.log.collective(op, nbytes, root=peer, **event)
        self.notes.post(
            index, Operation(op, group.label, group.ranks, peer, tag, shape, dtype, numel, reduce, where, direct, splits)
        )
        ticket = self.wire.transfer(op, group, peer, tag, nbytes) if self.wire else None
        handle = Handle(self, index, group, None if self.shapes_only else issue(), name, where, direct, ticket)
        if op == "send" and direct and name != "send" and not self.shapes_only:
            handle.guard(reads)
        (self._unwaited if direct else self._library)[index] = (name, where) if direct else handle
        handle.tensors = (*reads, *writes)
        self.flight.add(handle, reads, writes)
        self.counter.before = self._before
        self._since = now = self.now()
        self._change(index, end=now)
        return handle

    def _change(self, index: int, **columns) -> None:
        """Change columns of an event that was added already."""
        event = list(self.log.events[index])
        for name, value in columns.items():
            event[COLUMNS.index(name)] = value
        self.log.events[index] = tuple(event)

    def begin_wait(self, handle: Handle, for_ever: bool = True) -> None:
        """`for_ever`: the wait has no time limit of its own, so that it is stuck if nobody comes."""
        handle.began = self._flush()
        if for_ever and not self._over:
            self.notes.write("wait", handle.index)

    def end_wait(self, handle: Handle) -> None:
        self._unwaited.pop(handle.index, None)
        self._library.pop(handle.index, None)
        self.flight.remove(handle)
        if not self.flight:
            self.counter.before = None
        if self._over:
            return
        index, source = handle.index, None
        self._since = now = self.now()
        if handle.from_any:
            source = handle.group.ranks[handle.source_rank()]
            self._change(index, peer=source)
        label = self.log.index("labels", self._label())
        same_part = index == len(self.log.events) - 1 and self.log.events[index][COLUMNS.index("label")] == label
        if same_part:  # nothing happened in between: a blocking call
            self._change(index, blocking=True, end=now)
        else:
            self.log.wait(index, label=self._label(), line=calling_line()[0], start=handle.began, end=now)
        self.notes.write("done", index, source)

    def give_up(self, handle: Handle) -> None:
        """The wait raised (gloo cannot do this, or its time is over): the program has been told, and goes on or not."""
        self._unwaited.pop(handle.index, None)
        self._library.pop(handle.index, None)
        self.flight.remove(handle)
        if not self._over:
            self.notes.write("left", handle.index)

    def hand_over(self, handle: Handle) -> None:
        """The program asked for the handle's future: whoever holds that waits unseen."""
        if self._unwaited.pop(handle.index, None):
            self._library[handle.index] = handle

    def drop(self, handle: Handle) -> None:
        """A handle was thrown away without a wait. Called by the garbage collector: it must not raise."""
        self._unwaited.pop(handle.index, None)
        if not self._over:
            self._dropped = self._dropped or complaints.dropped(self.rank, handle.name, handle.where)
            self.notes.write("drop", handle.index, handle.name, handle.where)

    # ---- tensors in flight --------------------------------------------------------------------------------------------

    def _before(self, func, args, kwargs) -> None:
        self._look(list(tensors_in((args, kwargs))), written_by(func, args, kwargs), None, func._overloadpacket.__name__)

    def _look(self, reads, writes, where: str | None, what: str) -> None:
        """Something is about to use these tensors: does it get in the way of an operation in flight?"""
        if not self.flight:
            return
        for handle, how in self.flight.touched(reads, writes):
            if not handle.strict:
                handle.wait()
            elif not handle.misuse:
                handle.misuse = f"it was {how} by {what} at {where or calling_line()[0]}"
