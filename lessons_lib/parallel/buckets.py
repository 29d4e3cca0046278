"""Buckets: gradients are all-reduced a few at a time, each bucket as soon as backward has filled it, while backward goes on.

    buckets = Buckets(model, bucket_bytes=1_000_000)
    loss_of(mine).backward()      # all-reduces start in here, from hooks
    buckets.wait()                # gradients are averaged
    optimizer.step()

Source: Li et al., "PyTorch Distributed", arXiv:2006.15704, section 3.2.
"""

from __future__ import annotations

from contextlib import contextmanager
from numbers import Integral

import torch.distributed as dist

from .flat import by_dtype, hand_back, one_buffer, trainable, weighted_gradient
from .messages import position

BUCKET_BYTES = 25 * 2**20  # DDP's bucket_cap_mb=25


def whole_bytes(bucket_bytes) -> int:
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, Integral) or bucket_bytes < 1:
        raise ValueError(f"bucket_bytes is {bucket_bytes!r}, but must be a whole number of bytes, 1 or more.")
    return int(bucket_bytes)


def cut_into_buckets(parameters, bucket_bytes):
    """Lists of parameters, from the last to the first, as backward comes to them, each of at most `bucket_bytes` or of one."""
    buckets, bucket_bytes = [], whole_bytes(bucket_bytes)
    for same in by_dtype(reversed(trainable(parameters))):
        buckets.append([])
        size = 0
        for p in same:
            nbytes = p.numel() * p.element_size()
            if buckets[-1] and size + nbytes > bucket_bytes:
                buckets.append([])
                size = 0
            buckets[-1].append(p)
            size += nbytes
    return buckets


def add_once(arrived, parameter) -> None:
    if parameter in arrived:
        raise RuntimeError(
            "Backward ran a second time before buckets.wait(): what was sent lacks the second gradient. For several "
            "microbatches run all backwards but the last under `with buckets.no_synchronisation():`. Older Buckets of the same "
            "model go on watching it until their remove()."
        )
    arrived.add(parameter)


class Buckets:
    """Averages the gradients of `parameters` (or of a model) during backward: G bytes in one all-reduce a bucket.

    Set `share` before backward where parts of the batch are uneven: this rank's samples / all samples (1/n at first).
    Every rank starts its buckets in the same order, though backward may fill them in another: a bucket waits for those before it.
    A parameter that gets no gradient here holds its bucket up until wait(), where it counts as zeros.
    """

    def __init__(self, parameters, bucket_bytes=BUCKET_BYTES, group=None):
        self.buckets = cut_into_buckets(parameters, bucket_bytes)
        self.group, self.share, self.synchronise = group, 1 / position(group)[1], True
        self.arrived = set()  # parameters whose gradient is complete
        self.flying = []  # (buffer, handle) of each bucket that has started, in order
        self.hooks = [p.register_post_accumulate_grad_hook(self.gradient_ready) for p in sum(self.buckets, [])]

    def gradient_ready(self, parameter) -> None:
        """Backward calls this when it has added all that belongs to parameter.grad: once a backward, also for a tied one."""
        if not self.synchronise:
            return
        add_once(self.arrived, parameter)
        while len(self.flying) < len(self.buckets) and self.arrived.issuperset(self.buckets[len(self.flying)]):
            self.start_next()

    def start_next(self) -> None:
        bucket = self.buckets[len(self.flying)]
        buffer = one_buffer([weighted_gradient(p, self.share) for p in bucket])
        self.flying.append((buffer, dist.all_reduce(buffer, group=self.group, async_op=True)))

    def wait(self) -> None:
        """Start what backward has not filled, wait for every bucket, hand the averaged gradients to the parameters."""
        while len(self.flying) < len(self.buckets):
            self.start_next()
        for bucket, (buffer, handle) in zip(self.buckets, self.flying):
            handle.wait()
            hand_back(buffer, bucket)
        self.arrived, self.flying = set(), []

    @contextmanager
    def no_synchronisation(self):
        """Backward in here only accumulates: nothing is sent."""
        before, self.synchronise = self.synchronise, False
        try:
            yield
        finally:
            self.synchronise = before

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self.hooks:
            hook.remove()
