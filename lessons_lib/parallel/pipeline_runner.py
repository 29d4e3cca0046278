"""Runs any pipeline schedule that is data on real ranks: one rank's order of F, B and W, with the messages between.

    loss = run_schedule(stages, one_f_one_b(p, m), microbatches, mean_loss)
    loss = run_schedule(stages, zero_bubble_h1(p, m), microbatches, mean_loss)

Every action runs under torch.profiler.record_function with its own name ("F3"), as in PyTorch's schedules. When a rank posts, sends
and waits is decided in `schedule_calls`, which a replay reads too. Every message is received into a buffer of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.profiler import record_function

from .actions import Action, check_orders, size_of
from .messages import position
from .schedule_calls import Step, calls_of, steps_of, tag_of
from .schedules import timed
from .stages import Microbatch, Stage, check_microbatches
from .weight_gradients import WeightGradientsLater


def run_schedule(stages, orders, microbatches, mean_loss: Callable, group=None):
    """Forwards and backwards of one training step, by these orders; gradients of the mean over the batch are added up.

    stages: this rank's Stage, or its list of chunks, chunk c being stage c x p + rank. orders: for all ranks, as of schedules.py.
    microbatches: from split_into_microbatches, on every rank (the first stage reads inputs, the last targets, all the sizes).
    mean_loss(y, targets): the mean over one microbatch. Returns the mean over the batch on the last rank, None elsewhere:
    loss_everywhere hands it on. Where the orders have W, weights of linear layers get their gradients there (weight_gradients.py).
    """
    rank, p = position(group)
    microbatches = check_microbatches(microbatches)
    stages = check_stages(stages, rank, p, mean_loss)
    orders = _orders_for(orders, p, len(microbatches), len(stages), group)
    tasks = _Tasks(stages, steps_of(orders)[rank], microbatches, of_one_number(mean_loss), group, size_of(orders)[2])
    for kind, n in calls_of(orders)[rank]:
        getattr(tasks, kind)(n)
    return tasks.loss


@dataclass
class _Tasks:
    """What a rank has at hand while it runs its steps; a method for each kind of call."""

    stages: list[Stage]
    steps: list[Step]
    microbatches: list[Microbatch]
    mean_loss: Callable
    group: object
    split: bool

    def __post_init__(self):
        self.coming = {}  # step: (buffer, handle)
        self.going = {}  # step: handle of a send; it keeps its buffer
        self.here = {}  # (kind, stage, microbatch): the tensor that this action needs
        self.made = None  # by the last step: what SEND sends
        self.kept = {}  # (stage, microbatch): (x, y) between F and B
        self.later = {}  # (stage, microbatch): the weight gradients between B and W
        self.loss = None

    def receive(self, n: int) -> None:
        """Start to receive what step n needs, into a buffer of its own."""
        (kind, i, chunk), source, _ = self.steps[n]
        stage = self.stages[chunk]
        if kind == "F":
            buffer = stage.make_buffer(self.microbatches[i].inputs)
        else:
            buffer = torch.empty_like(self.kept[stage.index, i][1])
        tag = tag_of((kind, i), stage.index, len(self.microbatches))
        self.coming[n] = buffer, dist.irecv(buffer, group_src=source, group=self.group, tag=tag)

    def arrived(self, n: int) -> None:
        kind, i, chunk = self.steps[n].action
        buffer, handle = self.coming.pop(n)
        handle.wait()
        self.here[kind, self.stages[chunk].index, i] = buffer

    def compute(self, n: int) -> None:
        action, _, target = self.steps[n]
        stage = self.stages[action.chunk]
        arrived = self.here.pop((action.kind, stage.index, action.microbatch), None)
        with record_function(str(action)):
            made = self.run(action, stage, arrived)
        after = stage.index + (1 if action.kind == "F" else -1)
        if target is not None:
            self.made = made
        elif action.kind != "W" and 0 <= after < stage.stages:  # the next chunk is on this rank too
            self.here[action.kind, after, action.microbatch] = made

    def send(self, n: int) -> None:
        action, _, target = self.steps[n]
        after = self.stages[action.chunk].index + (1 if action.kind == "F" else -1)
        tag = tag_of(action, after, len(self.microbatches))
        self.going[n] = dist.isend(self.made.contiguous(), group_dst=target, group=self.group, tag=tag)
        self.made = None

    def sent(self, n: int) -> None:
        self.going.pop(n).wait()

    def run(self, action: Action, stage: Stage, arrived):
        """F: y of this stage. B: the gradient of x. W: nothing to hand on."""
        microbatch = self.microbatches[action.microbatch]
        key = stage.index, action.microbatch
        if action.kind == "F":
            x = microbatch.inputs if stage.first else arrived.requires_grad_()
            y = self.forward(stage, x, key)
            if stage.last:
                y = self.mean_loss(y, microbatch.targets) * microbatch.share
                self.loss = y.detach() if self.loss is None else self.loss + y.detach()
            self.kept[key] = x, y
            return y.detach()
        if action.kind == "B":
            x, y = self.kept.pop(key)
            y.backward(arrived)
            return x.grad
        self.later.pop(key).run()
        return None

    def forward(self, stage: Stage, x, key):
        if not self.split:
            return stage(x)
        with WeightGradientsLater() as later:
            y = stage(x)
        self.later[key] = later
        return y


# ---- checks ------------------------------------------------------------------------------------------------------------------


def check_stages(stages, rank: int, p: int, mean_loss) -> list[Stage]:
    stages = [stages] if isinstance(stages, Stage) else stages
    if not isinstance(stages, (list, tuple)) or not stages or not all(isinstance(stage, Stage) for stage in stages):
        raise TypeError(
            f"stages must be this rank's Stage, or a list of them (cut_into_stages(model, p * v)[rank::p]), not {stages!r}."
        )
    expected = [chunk * p + rank for chunk in range(len(stages))]
    found = [(stage.index, stage.stages) for stage in stages]
    if found != [(index, len(stages) * p) for index in expected]:
        raise ValueError(
            f"Rank {rank} of {p} holds {len(stages)} stage{'s'[: len(stages) > 1]}, so they must be stages {expected} of "
            f"{len(stages) * p}, not {[index for index, _ in found]} of {found[0][1]}: take cut_into_stages(model, p * v)[rank::p]."
        )
    if not callable(mean_loss):
        raise TypeError(f"mean_loss must be a function of (y, targets) that returns a mean, not {mean_loss!r}.")
    return list(stages)


def of_one_number(mean_loss: Callable) -> Callable:
    """`mean_loss`, but what it returns must be a tensor of one number."""

    def checked(y, targets):
        loss = mean_loss(y, targets)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shown = f"a tensor of {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
            raise TypeError(f"mean_loss(y, targets) returned {shown}, but must return a tensor of one number: the mean.")
        return loss

    return checked


def _orders_for(orders, p: int, m: int, v: int, group) -> list[list[Action]]:
    if dist.get_backend(group) == "nccl":
        raise ValueError(
            "This group is NCCL's, which takes all messages between two ranks in one row, sends and receives alike, and knows no "
            "tags: most schedules would hang. Take a group of gloo, or torch.distributed.pipelining, which sends in batches."
        )
    orders = check_orders(getattr(orders, "orders", orders), m, v)
    if len(orders) != p:
        raise ValueError(
            f"The orders are for {len(orders)} rank{'s'[: len(orders) > 1]}, but there are {p}: make them for p = {p}."
        )
    timed(orders)  # a circle is explained before anything moves
    return orders
