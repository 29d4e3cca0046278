"""The handle of an operation in flight, and what may not be done to its tensors before it is waited for."""

from __future__ import annotations

import ctypes
import zlib

import numpy as np
import torch
import torch.distributed as dist

from ..errors import BufferMisuse
from ..watch.complaints import in_flight

CHECKSUM_LIMIT = 65536  # bytes looked at, at most; of a larger tensor evenly spread samples
SAMPLE = 64  # bytes of one sample


def checksum(tensor) -> int | None:
    """Changes made behind PyTorch's back (through numpy, say) show in it; in a large tensor those that change much of it."""
    nbytes = tensor.numel() * tensor.element_size()
    if not nbytes:
        return None
    whole = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    if nbytes <= CHECKSUM_LIMIT:
        return zlib.crc32(whole)
    count = CHECKSUM_LIMIT // SAMPLE
    samples = np.ndarray((count, SAMPLE), np.uint8, whole, strides=((nbytes - SAMPLE) // (count - 1), 1))
    return zlib.crc32(samples.tobytes())


class Handle(dist.Work):
    """What an operation returns. Waiting twice is allowed and free, as in PyTorch.

    `name` is how the program spelled it ("isend"), `strict` whether the program itself holds the handle: a handle inside
    a library (DDP, FSDP, DTensor) is not blamed on the learner; there the first use of the result counts as the wait.
    """

    def __init__(self, recorder, index: int, group, inner, name: str, where: str, strict: bool, ticket=None):
        super().__init__()
        self.recorder, self.index, self.inner, self.name, self.where = recorder, index, inner, name, where
        self.group, self.strict, self.ticket = group, strict, ticket
        self.waited, self.began, self.misuse, self.proofs = False, 0.0, "", ()
        self.tensors = ()  # what is in flight stays in memory, as gloo keeps it: without data nobody else would
        self.from_any = False  # a receive that takes a message of any rank

    def guard(self, reads) -> None:
        """Remember what the tensors that are being sent hold, so that a change shows at the wait."""
        self.proofs = [(t, checksum(t)) for t in reads]

    def wait(self, timeout=None) -> bool:
        if not self.waited:
            self.recorder.begin_wait(self, for_ever=not timeout)
            if self.inner is not None:
                try:
                    with torch._C._DisableTorchDispatch():  # what gloo copies is not the program's computing
                        self.inner.wait(timeout) if timeout is not None else self.inner.wait()
                except Exception:
                    self.strict = False
                    self.recorder.give_up(self)
                    raise
            if self.ticket is not None:
                self.recorder.wire.sleep_until_done(self.ticket)
            self.finish()
        return True

    def finish(self) -> None:
        """The operation has ended: note it, and complain about what was done to its tensors meanwhile."""
        self.waited, self.tensors = True, ()
        self.recorder.end_wait(self)
        if self.strict:
            if not self.misuse and any(before is not None and checksum(t) != before for t, before in self.proofs):
                self.misuse = f"the tensor was changed between {self.where} and the wait"
            self.proofs = ()
            if self.misuse:
                raise BufferMisuse(in_flight(self.recorder.rank, self.name, self.where, self.misuse))

    def is_completed(self) -> bool:
        done = self.waited or (
            (self.inner is None or self.inner.is_completed()) and (self.ticket is None or self.recorder.wire.is_done(self.ticket))
        )
        if done and not self.waited:
            self.wait()
        return done

    def get_future(self):
        """A future of the result, as DDP asks for. Who holds it waits on it unseen; first use of the result counts."""
        if self.strict:
            self.strict = False
            self.recorder.hand_over(self)
        if self.inner is None:
            future = torch.futures.Future()
            future.set_result([])
            return future
        if self.ticket is not None:
            return self.recorder.wire.future(self)
        return self.inner.get_future()

    def is_success(self) -> bool:
        return self.waited

    def exception(self):
        return None

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def result(self):
        return self.inner.result() if self.inner is not None else []

    def source_rank(self) -> int:
        """The group rank that a receive from any rank took its message from."""
        return self.inner._source_rank()

    _source_rank = source_rank

    def __del__(self):
        if not self.waited and self.strict:
            self.recorder.drop(self)


class Several(dist.Work):
    """One handle for several operations that were issued together."""

    def __init__(self, handles):
        super().__init__()
        self.handles = list(handles)

    def wait(self, timeout=None) -> bool:
        for handle in self.handles:
            handle.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(handle.is_completed() for handle in self.handles)

    def get_future(self):
        return torch.futures.collect_all([handle.get_future() for handle in self.handles])

    def result(self):
        return [tensor for handle in self.handles for tensor in handle.result()]
