"""Sharded states by hand: ZeRO-1, 2 and 3. Every rank updates only its 1/n of the parameters, and keeps only that part's states.

    zero = Zero1(model, make_optimizer=lambda shards: torch.optim.AdamW(shards, lr=0.01))
    loss_of(mine).backward()
    zero.reduce_gradients()       # shards have their gradient: clip_gradients(1.0, sharded=zero.shards) goes here
    zero.step()

Set zero.share before backward where parts of the batch are uneven: this rank's samples / all samples (1/n at first).
G is the bytes of all gradients, and as many of parameters. A reduce-scatter or an all-gather of S bytes makes each rank send
(n-1)/n x S. Frozen parameters stay on every rank. Source: ZeRO, arXiv:1910.02054, sections 5 and 7; ZeRO-3 with hooks, as FSDP:
arXiv:2304.11277.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from .flat import one_buffer, one_dtype, weighted_gradient
from .messages import position


class FlatUnit:
    """Parameters as pieces of one buffer, `full`, padded to a multiple of n elements; `shard` is a copy of this rank's 1/n.

    `full` holds S bytes, and none between free() and gather(). All parameters must have the same dtype.
    """

    def __init__(self, parameters, group=None):
        self.parameters, self.group = one_dtype(parameters), group
        rank, self.n = position(group)
        self.full = one_buffer(self.parameters, multiple=self.n)
        self.nbytes, self.here = self.full.numel() * self.full.element_size(), True
        for p, piece in zip(self.parameters, views(self.full, self.parameters)):
            p.data = piece
        self.shard = nn.Parameter(self.full.chunk(self.n)[rank].clone())

    def gather(self) -> None:
        """The parameters become what all shards hold: an all-gather of S bytes. Nothing where they are here already."""
        if not self.here:
            self.full.untyped_storage().resize_(self.nbytes)
            dist.all_gather_single(self.full, self.shard.detach(), group=self.group)
            self.here = True

    def free(self) -> None:
        """Give the memory of the whole parameters back; the shard stays. Autograd finds them again after gather()."""
        self.full.untyped_storage().resize_(0)
        self.here = False

    def reduce_gradients(self, share) -> None:
        """Add the averaged gradient to the shard's and drop the whole one: a reduce-scatter of S bytes."""
        whole = one_buffer([weighted_gradient(p, share) for p in self.parameters], multiple=self.n)
        mine = torch.empty_like(self.shard)
        dist.reduce_scatter_single(mine, whole, group=self.group)
        self.shard.grad = mine if self.shard.grad is None else self.shard.grad + mine
        for p in self.parameters:
            p.grad = None


def views(buffer, parameters) -> list[torch.Tensor]:
    """The buffer's pieces, one for each parameter and of its shape; they share the buffer's memory."""
    counts = [p.numel() for p in parameters]
    pieces = buffer[: sum(counts)].split(counts)
    return [piece.view(p.shape) for p, piece in zip(parameters, pieces)]


def flat_units(model, modules, group=None) -> list[FlatUnit]:
    """A unit for each of `modules`, and one more for what is in none of them, if anything is."""
    units, rest = units_of(model, modules)
    return [FlatUnit(unit, group) for unit in [*units, rest] if unit]


def units_of(model, modules) -> tuple[list[list[nn.Parameter]], list[nn.Parameter]]:
    """(trainable parameters of each module, the others'). A parameter that is tied to one outside its module is of the others."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {model!r} (a {type(model).__name__}).")
    inside = set(model.modules())
    modules = list(modules) if isinstance(modules, (list, tuple, nn.ModuleList)) else modules
    if not isinstance(modules, list) or not modules or any(m not in inside or m is model for m in modules):
        raise ValueError(f"modules must be a list of parts of the model, such as model.blocks, not {modules!r}.")
    everywhere = _times(model)
    units, taken = [], set()
    for times in map(_times, modules):
        unit = [p for p, count in times.items() if p.requires_grad and count == everywhere[p]]
        if not unit or taken & set(unit):
            raise ValueError("Each of the modules must have a trainable parameter of its own, and none may be inside another.")
        units.append(unit)
        taken |= set(unit)
    return units, [p for p in everywhere if p.requires_grad and p not in taken]


def _times(module) -> dict:
    """How often each parameter occurs in the module: more than once where it is tied."""
    times: dict = {}
    for _, p in module.named_parameters(remove_duplicate=False):
        times[p] = times.get(p, 0) + 1
    return times


class Zero1:
    """Optimiser states are sharded. A step: one reduce-scatter and one all-gather of G bytes, together as much as an all-reduce.

    Whole gradients stay until reduce_gradients(), so microbatches accumulate in them without sending.
    """

    def __init__(self, model, make_optimizer, group=None):
        self.unit, self.share = FlatUnit(model, group), 1 / position(group)[1]
        self.shards = [self.unit.shard]
        self.optimizer = optimizer_of(self.shards, make_optimizer)

    def reduce_gradients(self) -> None:
        self.unit.reduce_gradients(self.share)

    def step(self) -> None:
        """Update this rank's part, forget its gradient, and fetch what the other ranks have updated."""
        update_shards([self.unit], self.optimizer)
        self.unit.gather()


class Zero2:
    """Gradients are sharded too: each module's is reduce-scattered when backward has completed it, and the whole one dropped.

    A step: G bytes of reduce-scatter, G bytes of all-gather, one call of each a unit. Units: each of `modules`, and the rest of the
    model. Every backward sends: m microbatches reduce-scatter m x G bytes. All ranks must use the same parameters: units of one
    size that are reduced in another order on another rank are mixed, and nothing tells.
    """

    def __init__(self, model, modules, make_optimizer, group=None):
        self.units = flat_units(model, modules, group)
        self.share, self.shards = 1 / position(group)[1], [unit.shard for unit in self.units]
        self.optimizer = optimizer_of(self.shards, make_optimizer)
        self.waiting = watch(self.units, self.reduce)

    def reduce(self, unit) -> None:
        unit.reduce_gradients(self.share)
        self.waiting[unit] = set(unit.parameters)

    def reduce_gradients(self) -> None:
        """What backward has not completed, because a parameter got no gradient: the rest was reduced on the way."""
        for unit in incomplete(self.units, self.waiting):
            self.reduce(unit)

    def step(self) -> None:
        update_shards(self.units, self.optimizer, incomplete(self.units, self.waiting))
        for unit in self.units:
            unit.gather()


class Zero3:
    """Parameters are sharded too: a module's are gathered for its forward, freed, gathered for its backward, and freed again.

    A step: G bytes of reduce-scatter, and for each of `modules` two all-gathers of its bytes: 3(n-1)/n x G sent. What is in none of
    them is gathered once, before forward, and freed after its gradient, as in PyTorch's FSDP2. All ranks must run the same modules.
    """

    def __init__(self, model, modules, make_optimizer, group=None):
        self.units = flat_units(model, modules, group)
        self.share, self.shards = 1 / position(group)[1], [unit.shard for unit in self.units]
        self.optimizer = optimizer_of(self.shards, make_optimizer)
        self.waiting = watch(self.units, self.reduce)
        for module, unit in zip([*modules, model], self.units):
            unit.free()
            module.register_forward_pre_hook(lambda module, inputs, unit=unit: unit.gather())
            if module is not model:
                module.register_forward_hook(lambda module, inputs, output, unit=unit: self.after_forward(unit, output))

    def after_forward(self, unit, output) -> None:
        unit.free()
        if output.requires_grad:  # the gradient of a module's output is known just before the module's backward
            output.register_hook(lambda gradient: unit.gather())

    def reduce(self, unit) -> None:
        unit.reduce_gradients(self.share)
        self.waiting[unit] = set(unit.parameters)
        unit.free()

    def reduce_gradients(self) -> None:
        for unit in incomplete(self.units, self.waiting):
            self.reduce(unit)

    def step(self) -> None:
        update_shards(self.units, self.optimizer, incomplete(self.units, self.waiting))

    def gather(self) -> None:
        """All parameters on every rank, to save or to look at."""
        for unit in self.units:
            unit.gather()

    def free(self) -> None:
        for unit in self.units:
            unit.free()


def watch(units, reduce) -> dict:
    """{unit: parameters whose gradient is still to come}; calls reduce(unit) when there is none left."""
    waiting = {unit: set(unit.parameters) for unit in units}

    def ready(unit, parameter):
        waiting[unit].discard(parameter)
        if not waiting[unit]:
            reduce(unit)

    for unit in units:
        for p in unit.parameters:
            p.register_post_accumulate_grad_hook(lambda parameter, unit=unit: ready(unit, parameter))
    return waiting


def incomplete(units, waiting) -> list:
    """Units that are still to be reduced. RuntimeError where no backward has run: its order, the same on all ranks, is theirs."""
    if all(unit.shard.grad is None and len(waiting[unit]) == len(unit.parameters) for unit in units):
        raise RuntimeError(
            "No backward has run on this rank since the last step, so its units would be reduced in another order than on ranks "
            "where one has. Every rank runs one: where a rank has no samples, take any sample and set zero.share = 0 before."
        )
    return [unit for unit in units if unit.shard.grad is None or len(waiting[unit]) < len(unit.parameters)]


def optimizer_of(shards, make_optimizer):
    if not callable(make_optimizer):
        raise TypeError(
            f"make_optimizer must be a function of the shards, such as lambda shards: torch.optim.AdamW(shards, lr=0.01), "
            f"not {make_optimizer!r}."
        )
    optimizer = make_optimizer(shards)
    if not callable(getattr(optimizer, "step", None)):
        raise TypeError(f"make_optimizer must return an optimizer, such as torch.optim.AdamW(shards, lr=0.01), not {optimizer!r}.")
    return optimizer


def update_shards(units, optimizer, incomplete=()) -> None:
    """Step on the shards, then forget their gradients; the whole parameters are out of date from here on."""
    if incomplete or any(unit.shard.grad is None for unit in units):
        raise RuntimeError("step() was called before reduce_gradients(): shards lack their gradient. Call that after backward.")
    optimizer.step()
    for unit in units:
        unit.shard.grad = None
        unit.free()
