"""A model cut into stages, and a batch cut into microbatches: what a pipeline runs on.

    mine = cut_into_stages(model, p * v)[rank::p]          # v stages for each of p ranks; chunk c of rank r is stage c x p + r
    microbatches = split_into_microbatches(tokens[:, :-1], tokens[:, 1:], m)

x (samples, sequence, hidden) goes from a stage to the next, its gradient comes back: one message each, samples x sequence x hidden
numbers. Source: arXiv:2104.04473, section 2.2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from .cuts import layers_of_stages, whole
from .messages import flat, position


class Stage(nn.Module):
    """Stage `index` of `stages`: some parts of a model, one after the other. Microbatch or x in, x or logits out.

    make_buffer(inputs): an empty tensor like the x that the stage before sends for a microbatch with these inputs; the first stage
    needs none. tied: the weight that is also on another stage (first and last share their embedding), or None.
    """

    def __init__(self, parts, index: int, stages: int, make_buffer=None, tied=None):
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.stages = whole(stages, "stages", 1, 10_000)
        self.index = whole(index, "index (of the stage)", 0, stages - 1)
        if self.index and not callable(make_buffer):
            raise TypeError(
                f"Stage {index} receives from stage {index - 1}, so it needs make_buffer, a function that turns a microbatch's "
                f"inputs into an empty tensor of the shape that arrives, not {make_buffer!r}."
            )
        if tied is not None and not isinstance(tied, nn.Parameter):
            raise TypeError(f"tied must be the weight that is also on another stage, an nn.Parameter, or None, not {tied!r}.")
        self.make_buffer, self._tied = make_buffer, [tied]  # in a list: it is a parameter of one of the parts already

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.stages - 1

    @property
    def tied(self):
        return self._tied[0]

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x if self.last else to_send(x)


def to_send(y: torch.Tensor) -> torch.Tensor:
    """`y` as it can be sent, and as backward can begin at it, also where all before it is frozen."""
    y = y.contiguous()
    if torch.is_grad_enabled() and not y.requires_grad and y.is_floating_point():
        y = y.detach().requires_grad_()  # a leaf: its gradient arrives, and ends here
    return y


def cut_into_stages(model: nn.Module, stages: int, layers=None) -> list[Stage]:
    """All stages of a transformer: its embedding on the first, its blocks in order, its head on the last.

    `layers`: how many blocks each has; else as even as can be. Nothing is copied: keep the stages of this rank, drop the model.
    """
    missing = [name for name in ("embedding", "blocks", "head", "shape") if not hasattr(model, name)]
    if not isinstance(model, nn.Module) or missing:
        raise TypeError(
            f"A transformer with embedding, blocks, head and shape is needed, not a {type(model).__name__}"
            f"{f' without {missing[0]}' if missing else ''}. "
            "Of any other model make the stages yourself: Stage([part, part, ...], index, stages, make_buffer)."
        )
    weight, hidden = next(model.blocks.parameters()), model.shape.hidden
    cuts = layers_of_stages(len(model.blocks), stages, layers)
    shared = model.head.logits.weight if model.head.logits.weight is model.embedding.tokens.weight else None

    def make_buffer(tokens):
        return torch.empty(*tokens.shape, hidden, dtype=weight.dtype, device=weight.device)

    made = []
    for index, cut in enumerate(cuts):
        first, last = index == 0, index == stages - 1
        parts = [model.embedding] * first + [model.blocks[layer] for layer in cut] + [model.head] * last
        made.append(Stage(parts, index, stages, make_buffer, shared if first or last else None))
    return made


# ---- microbatches ------------------------------------------------------------------------------------------------------------


class Microbatch(NamedTuple):
    """Part `number` of a batch. `share`: its samples / all samples, the weight of its mean loss; 1/m where all are equal."""

    number: int
    inputs: torch.Tensor
    targets: torch.Tensor
    share: float


def split_into_microbatches(inputs, targets, m: int) -> list[Microbatch]:
    """`inputs` and `targets` (samples, ...) cut into m parts; the last ones have one sample less where m does not divide."""
    for name, given in (("inputs", inputs), ("targets", targets)):
        if not isinstance(given, torch.Tensor) or given.dim() == 0:
            raise TypeError(f"{name} must be a tensor with the samples along its first dimension, not {given!r}.")
    samples = len(inputs)
    if len(targets) != samples:
        raise ValueError(f"There are {samples} inputs and {len(targets)} targets: each sample needs one of both.")
    m = whole(m, "m, the number of microbatches,", 1, max(samples, 1))
    if not samples:
        raise ValueError("The batch has no samples, so it cannot be split into microbatches.")
    parts = zip(inputs.tensor_split(m), targets.tensor_split(m))
    return [Microbatch(i, x, y, len(x) / samples) for i, (x, y) in enumerate(parts)]


def check_microbatches(microbatches) -> list[Microbatch]:
    sound = isinstance(microbatches, (list, tuple)) and all(isinstance(one, Microbatch) for one in microbatches)
    if not sound or not microbatches:
        raise TypeError(f"microbatches must be a list from split_into_microbatches(inputs, targets, m), not {microbatches!r}.")
    return list(microbatches)


# ---- tied embeddings, the loss -------------------------------------------------------------------------------------------------


def first_and_last(group=None):
    """A group of the first and the last rank, for tied weights. Every rank of `group` calls it, once; None if there is but one."""
    _, p = position(group)
    if p <= 2:
        return None if p == 1 else group or dist.group.WORLD
    # local: ranks outside `group`, which may be ends of a pipeline of their own, need not call it
    made = dist.new_group([_global(0, group), _global(p - 1, group)], use_local_synchronization=True)
    return dist.GroupMember.NON_GROUP_MEMBER if made is None else made


def sum_tied_gradients(stages, ends) -> None:
    """After backward: both copies of the tied weight get the sum of their gradients. One all-reduce of the weight's bytes.

    stages: those of this rank. ends: first_and_last(). Between the first and the last rank; the others do nothing.
    """
    for weight in _tied_copies(stages, ends):
        if weight.grad is None:
            raise ValueError("The tied weight has no gradient yet: call sum_tied_gradients after the last backward of the step.")
        dist.all_reduce(weight.grad, group=ends)


def copy_tied_weight(stages, ends) -> None:
    """Before the first step: the last rank's copy becomes that of the first, however the ranks were seeded. One broadcast."""
    for weight in _tied_copies(stages, ends):
        dist.broadcast(flat(weight), group_src=0, group=ends)


def loss_everywhere(loss, group=None) -> float | torch.Tensor:
    """The last rank's loss on every rank: a broadcast of 8 bytes. `loss` is None on the others."""
    rank, p = position(group)
    if loss is not None and (not isinstance(loss, torch.Tensor) or loss.numel() != 1) or loss is None and rank == p - 1:
        raise TypeError(
            f"loss is {loss!r} on rank {rank} of {p}, but must be what the step returned: a tensor of one number on the last rank, "
            "None on the others."
        )
    buffer = torch.zeros((), dtype=torch.float64) if loss is None else loss.detach().double().reshape(())
    dist.broadcast(buffer, group_src=p - 1, group=group)
    return buffer


def _tied_copies(stages, ends) -> list[nn.Parameter]:
    stages = [stages] if isinstance(stages, Stage) else stages
    if not isinstance(stages, (list, tuple)) or not all(isinstance(stage, Stage) for stage in stages):
        raise TypeError(f"stages must be this rank's Stage, or the list of its stages, not {stages!r}.")
    tied = [stage for stage in stages if stage.tied is not None]
    if ends is None or ends is dist.GroupMember.NON_GROUP_MEMBER:
        if len({stage.first for stage in tied}) == 1 and tied[0].stages > 1:  # the other copy is on another rank
            raise ValueError(
                f"ends is {ends!r}, but this rank holds one of the two copies of the tied weight: give first_and_last(group), "
                "which every rank of the pipeline calls once, before the first step."
            )
        return []  # none is here; or one rank holds both: one parameter
    if not isinstance(ends, dist.ProcessGroup):
        raise TypeError(f"ends must be what first_and_last(group) returned, not {ends!r} (a {type(ends).__name__}).")
    return [stage.tied for stage in tied if stage.tied.requires_grad]


def _global(rank: int, group) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)
