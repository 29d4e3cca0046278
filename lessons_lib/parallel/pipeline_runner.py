"""Runs any pipeline schedule that is data on real ranks: one rank's order of F, B and W, with the messages between.

    loss = run_schedule(stages, one_f_one_b(p, m), microbatches, mean_loss)
    loss = run_schedule(stages, zero_bubble_h1(p, m), microbatches, mean_loss)

Every action runs under torch.profiler.record_function with its own name ("F3"), as in PyTorch's schedules. The receive for the next
action is posted before this one computes, into a fresh buffer, so that a message moves meanwhile. Sends are never waited for where
that could hold a rank up: only when a later message from the same rank proves that it has received.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import record_function

from .actions import Action, check_orders, needs, size_of
from .messages import position
from .schedules import timed
from .stages import Microbatch, Stage, check_microbatches
from .weight_gradients import WeightGradientsLater


class Step(NamedTuple):
    """One action of a rank, and its messages. Ranks are counted within the group; None: no message."""

    action: Action
    source: int | None  # who sends what the action needs
    target: int | None  # who needs what it gives
    received: tuple[int, ...]  # own earlier steps whose message has been received once this step's message is here


def steps_of(orders, rank: int) -> list[Step]:
    """What `rank` does, action by action. ScheduleError if an action is missing or there twice."""
    p, v = len(orders), size_of(orders)[1]
    place = {(r, one): n for r, order in enumerate(orders) for n, one in enumerate(order)}
    user = {}  # whose output goes to another rank: (rank, action) that reads it
    for r, order in enumerate(orders):
        for one in order:
            user.update({made: (r, one) for made in needs(one, r, p, v) if made[0] != r})
    flying: list[tuple[int, int, int]] = []  # (own step, receiver, receiver's step that uses the message)
    steps = []
    for n, one in enumerate(orders[rank]):
        source = next((made for made in needs(one, rank, p, v) if made[0] != rank), None)
        received = ()
        if source:
            sure = [f for f in flying if f[1] == source[0] and f[2] <= place[source]]
            flying = [f for f in flying if f not in sure]
            received = tuple(own for own, _, _ in sure)
        reader = user.get((rank, one))
        if reader:
            flying.append((n, reader[0], place[reader]))
        steps.append(Step(one, source[0] if source else None, reader[0] if reader else None, received))
    return steps


def run_schedule(stages, orders, microbatches, mean_loss: Callable, group=None):
    """Forwards and backwards of one training step, by these orders; gradients of the mean over the batch are added up.

    stages: the Stage of this rank, or its list of chunks, chunk c being stage c x p + rank. orders: for all ranks, as of schedules.py.
    microbatches: from split_into_microbatches, on every rank (the first stage reads inputs, the last targets, all the sizes).
    mean_loss(y, targets): the mean over one microbatch. Returns the mean over the batch on the last rank, None elsewhere:
    loss_everywhere hands it on. Where the orders have W, weights of linear layers get their gradients there (weight_gradients.py).
    """
    rank, p = position(group)
    microbatches = check_microbatches(microbatches)
    stages = _checked(stages, rank, p, mean_loss)
    orders = _orders_for(orders, p, len(microbatches), len(stages), group)
    rank_step = _RankStep(stages, microbatches, mean_loss, rank, p, group, size_of(orders)[2])
    steps = steps_of(orders, rank)
    rank_step.post(steps[0], 0)
    for n, step in enumerate(steps):
        arrived = rank_step.take(step, n)
        if n + 1 < len(steps):
            rank_step.post(steps[n + 1], n + 1)
        with record_function(str(step.action)):
            made = rank_step.compute(step.action, arrived)
        rank_step.hand_on(step, n, made)
    rank_step.finish()
    return rank_step.loss


@dataclass
class _RankStep:
    """What a rank has at hand while it runs its steps."""

    stages: list[Stage]
    microbatches: list[Microbatch]
    mean_loss: Callable
    rank: int
    p: int
    group: object
    split: bool

    def __post_init__(self):
        self.coming = {}  # step: (buffer, handle)
        self.sending = {}  # step: handle; it keeps its buffer
        self.here = {}  # (kind, stage, microbatch): a tensor that another chunk of this rank made
        self.kept = {}  # (stage, microbatch): (x, y) between F and B
        self.later = {}  # (stage, microbatch): the weight gradients between B and W
        self.loss = None

    def stage_of(self, action: Action) -> Stage:
        return self.stages[action.chunk]

    def post(self, step: Step, n: int) -> None:
        """Start to receive what step n needs, into a buffer of its own."""
        if step.source is not None:
            stage, i = self.stage_of(step.action), step.action.microbatch
            if step.action.kind == "F":
                buffer = stage.make_buffer(self.microbatches[i].inputs)
            elif (stage.index, i) in self.kept:
                buffer = torch.empty_like(self.kept[stage.index, i][1])
            else:
                return  # this microbatch's forward is the step before: what it gives says the shape
            tag = self.tag(step.action.kind, stage.index, i)
            self.coming[n] = buffer, dist.irecv(buffer, group_src=step.source, group=self.group, tag=tag)

    def take(self, step: Step, n: int):
        """What step n needs: from another rank, from another chunk here, or nothing."""
        if step.source is None:
            return self.here.pop((step.action.kind, self.stage_of(step.action).index, step.action.microbatch), None)
        if n not in self.coming:
            self.post(step, n)
        buffer, handle = self.coming.pop(n)
        handle.wait()
        for own in step.received:
            self.sending.pop(own).wait()
        return buffer

    def compute(self, action: Action, arrived):
        """F: y of this stage. B: the gradient of x. W: nothing to hand on."""
        stage, microbatch = self.stage_of(action), self.microbatches[action.microbatch]
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

    def hand_on(self, step: Step, n: int, made) -> None:
        """Send what step n made, or leave it for another chunk of this rank."""
        kind, i, _ = step.action
        stage = self.stage_of(step.action)
        after = stage.index + (1 if kind == "F" else -1)
        if step.target is not None:
            tag = self.tag(kind, after, i)
            self.sending[n] = dist.isend(made.contiguous(), group_dst=step.target, group=self.group, tag=tag)
        elif kind != "W" and 0 <= after < stage.stages:
            self.here[kind, after, i] = made

    def tag(self, kind: str, stage: int, microbatch: int) -> int:
        """A number for each message, so that neighbours may take microbatches in different orders."""
        return (stage * 2 + (kind == "B")) * len(self.microbatches) + microbatch

    def finish(self) -> None:
        for handle in self.sending.values():
            handle.wait()


# ---- checks ------------------------------------------------------------------------------------------------------------------


def _checked(stages, rank: int, p: int, mean_loss) -> list[Stage]:
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


def _orders_for(orders, p: int, m: int, v: int, group) -> list[list[Action]]:
    if dist.get_backend(group) == "nccl":
        raise ValueError(
            "This group is NCCL's, which takes all messages between two ranks in one row, sends and receives alike, and knows no tags: "
            "most schedules would hang. Give a group of gloo; on GPUs take torch.distributed.pipelining, which sends in batches."
        )
    orders = check_orders(getattr(orders, "orders", orders), m, v)
    if len(orders) != p:
        raise ValueError(
            f"The orders are for {len(orders)} rank{'s'[: len(orders) > 1]}, but there are {p}: make them for p = {p}."
        )
    timed(orders)  # a circle is explained before anything moves
    return orders
