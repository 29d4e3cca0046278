"""Pipeline parallel from scratch: each rank holds one stage of the model, and microbatches flow through it and back.

    stage = cut_into_stages(model, p)[rank]
    microbatches = split_into_microbatches(inputs, targets, m)
    loss = one_f_one_b_step(stage, microbatches, mean_loss)   # the mean over the whole batch on the last rank, None elsewhere
    sum_tied_gradients(stage, ends)
    optimizer.step()

mean_loss(y, targets) is the mean over one microbatch's samples. Each rank receives into a fresh buffer and sends without waiting;
what is sent is left alone until it is waited for. Every schedule that is data, also with several stages a rank and with backward
split in two, is run by `run_schedule` of `pipeline_runner`; stages and microbatches are in `stages`; all can be had from here.
Ranks are counted within `group`, by default all.
"""

from __future__ import annotations

from collections import deque
from functools import wraps

import torch
import torch.distributed as dist
from torch.profiler import record_function

from .in_flight import ActivationMeter
from .messages import position
from .pipeline_runner import check_stages, of_one_number, run_schedule
from .stages import (
    Microbatch,
    Stage,
    check_microbatches,
    copy_tied_weight,
    cut_into_stages,
    first_and_last,
    layers_of_stages,
    loss_everywhere,
    split_into_microbatches,
    sum_tied_gradients,
)
from .weight_gradients import WeightGradientsLater

__all__ = [
    "ActivationMeter", "Microbatch", "Stage", "WeightGradientsLater", "backward_step", "copy_tied_weight", "cut_into_stages",
    "first_and_last", "forward_step", "gpipe_step", "layers_of_stages", "loss_everywhere", "one_f_one_b_step", "receive",
    "run_schedule", "split_into_microbatches", "sum_tied_gradients",
]  # fmt: skip


def receive(buffer, source, group=None):
    """What rank `source` sends next, in `buffer`, which nobody else has."""
    dist.recv(buffer, group_src=source, group=group)
    return buffer


def forward_step(stage, microbatch, mean_loss, group=None):
    """One microbatch through this stage: (number, x, y, handle of the send). On the last stage y is its part of the loss."""
    rank, _ = position(group)
    x = microbatch.inputs
    if not stage.first:
        x = receive(stage.make_buffer(x), rank - 1, group).requires_grad_()
    with record_function(f"F{microbatch.number}"):
        y = stage(x)
        if stage.last:
            y = mean_loss(y, microbatch.targets) * microbatch.share
    sending = None if stage.last else dist.isend(y.detach(), group_dst=rank + 1, group=group)
    return microbatch.number, x, y, sending


def backward_step(number, x, y, sending, group=None):
    """The gradients of that microbatch: of the weights, which add up, and of x, which is sent. Returns the handle of that send."""
    rank, _ = position(group)
    gradient = None
    if sending is not None:
        gradient = receive(torch.empty_like(y), rank + 1, group)
        sending.wait()  # y has arrived: its gradient is here
    with record_function(f"B{number}"):
        y.backward(gradient)
    return dist.isend(x.grad, group_dst=rank - 1, group=group) if rank > 0 else None


def gpipe_step(stage, microbatches, mean_loss, group=None):
    """All forwards, then all backwards: gradients of the mean over the batch. Returns it on the last rank, None elsewhere."""
    kept = [forward_step(stage, microbatch, mean_loss, group) for microbatch in microbatches]
    sent = [backward_step(*one, group) for one in kept]
    wait_for(sent)
    return sum(y.detach() for _, _, y, _ in kept) if stage.last else None


def one_f_one_b_step(stage, microbatches, mean_loss, group=None):
    """The same gradients by 1F1B: at most p - rank microbatches in flight. Returns the mean on the last rank, None elsewhere."""
    rank, p = position(group)
    kept, sent, total = deque(), [], 0.0
    for done, microbatch in enumerate(microbatches):
        kept.append(forward_step(stage, microbatch, mean_loss, group))
        if stage.last:
            total = total + kept[-1][2].detach()
        if done >= p - 1 - rank:  # the warm-up is over: one forward, one backward
            sent.append(backward_step(*kept.popleft(), group))
    while kept:  # cool-down
        sent.append(backward_step(*kept.popleft(), group))
    wait_for(sent)
    return total if stage.last else None


def wait_for(sent) -> None:
    """All sends have arrived: their buffers are free."""
    for handle in sent:
        if handle is not None:
            handle.wait()


def _checked(step):
    """`step`, but what it cannot run on is refused before anything moves. Outside of it, so that a lesson shows the step alone."""

    @wraps(step)
    def checked(stage, microbatches, mean_loss, group=None):
        if not isinstance(stage, Stage):
            raise TypeError(f"stage must be this rank's one Stage, cut_into_stages(model, p)[rank], not {stage!r}.")
        check_stages(stage, *position(group), mean_loss)
        return step(stage, check_microbatches(microbatches), of_one_number(mean_loss), group)

    return checked


gpipe_step, one_f_one_b_step = _checked(gpipe_step), _checked(one_f_one_b_step)
