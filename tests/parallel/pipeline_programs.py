"""What the tests of pipeline parallel run on ranks: each way to run a step, for several steps, beside one process.

All in float64, so that only mistakes differ: AdamW divides small gradients by themselves, and would enlarge rounding.
"""

import random
from dataclasses import replace
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import nn

from lessons_lib import run, shapes
from lessons_lib.models import Transformer, next_token_loss
from lessons_lib.parallel import pipeline, schedules
from lessons_lib.parallel.actions import needs

STEPS = 3
SEQUENCE = 6
SHAPE = replace(shapes.TINY, layers=8, hidden=32, feed_forward=128, vocabulary=48, length=16)
adamw = partial(torch.optim.AdamW, lr=0.01)


def model_of(seed=0, shape=SHAPE):
    return Transformer(shape, dtype=torch.float64, seed=seed)


def tokens(step, samples, shape=SHAPE):
    return torch.randint(shape.vocabulary, (samples, SEQUENCE + 1), generator=torch.Generator().manual_seed(100 + step))


def batch(step, samples, m, shape=SHAPE):
    rows = tokens(step, samples, shape)
    return pipeline.split_into_microbatches(rows[:, :-1], rows[:, 1:], m)


def train(model, samples, steps=STEPS, shape=SHAPE):
    """(losses, gradients of the first step, parameters after the last), by name, in one process."""
    losses, first, optimizer = [], None, adamw(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        rows = tokens(step, samples, shape)
        loss = next_token_loss(model(rows[:, :-1]), rows[:, 1:])
        loss.backward()
        first = first or {name: p.grad.clone() for name, p in model.named_parameters()}
        losses.append(loss.detach())
        optimizer.step()
    return torch.stack(losses), first, {name: p.detach() for name, p in model.named_parameters()}


@cache
def one_process(samples):
    return train(model_of(), samples)


def run_ways(p: int, m: int) -> dict:
    """Every way to run a step: (chunks a rank, what does it)."""
    ways = {
        "GPipe by hand": (1, pipeline.gpipe_step),
        "1F1B by hand": (1, pipeline.one_f_one_b_step),
    }
    tables = {
        "GPipe": (1, schedules.gpipe(p, m)),
        "1F1B": (1, schedules.one_f_one_b(p, m)),
        "ZB-H1": (1, schedules.zero_bubble_h1(p, m)),
        "greedy, two in flight": (1, schedules.greedy(p, m, 2, split=True)),
        "backwards from the last": (1, [[f"F{i}" for i in range(m)] + [f"B{i}" for i in reversed(range(m))]] * p),
    }
    turned = [[(i + rank) % m for i in range(m)] for rank in range(p)]
    tables["each rank in its own order"] = (1, [[f"F{i}" for i in mine] + [f"B{i}" for i in mine] for mine in turned])
    if m % p == 0:
        tables["interleaved"] = (2, schedules.interleaved(p, m, 2))
    for name, (v, orders) in tables.items():
        ways[name] = (v, lambda stages, *args, orders=orders: pipeline.run_schedule(stages, orders, *args))
    return ways


def any_orders(seed, p, m, v, split):
    """Orders in which every rank took, again and again, one of the actions that were ready."""
    draw, done, orders = random.Random(seed), set(), [[] for _ in range(p)]
    left = [
        (rank, schedules.Action(kind, i, c))
        for rank in range(p)
        for kind in ("FBW" if split else "FB")
        for i in range(m)
        for c in range(v)
    ]
    while left:
        rank, one = draw.choice([pair for pair in left if done.issuperset(needs(pair[1], pair[0], p, v))])
        left.remove((rank, one))
        done.add((rank, one))
        orders[rank].append(one)
    return orders


def pipelined(samples, m, way, seed=None, shape=SHAPE, layers=None, steps=STEPS):
    """(losses, gradients of the first step, parameters after the last) of this rank's stages, by name."""
    rank, p = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    v, step_by = run_ways(p, m)[way]
    model = model_of(rank if seed is None else seed, shape)
    stages, ends = pipeline.cut_into_stages(model, p * v, layers)[rank::p], pipeline.first_and_last()
    pipeline.copy_tied_weight(stages, ends)
    mine = {id(p) for stage in stages for p in stage.parameters()}
    named = {name: p for name, p in model.named_parameters() if id(p) in mine}
    optimizer, losses, first = adamw(named.values()), [], None
    for step in range(steps):
        optimizer.zero_grad()
        loss = step_by(stages if len(stages) > 1 else stages[0], batch(step, samples, m, shape), next_token_loss)
        pipeline.sum_tied_gradients(stages, ends)
        first = first or {name: p.grad.clone() for name, p in named.items()}
        losses.append(pipeline.loss_everywhere(loss))
        optimizer.step()
    return torch.stack(losses), first, {name: p.detach() for name, p in named.items()}


@cache
def trained(p, samples, m):
    """The recording of all ways one after the other; results[rank] is {way: ...}."""

    def program():
        return {way: pipelined(samples, m, way, seed=0) for way in run_ways(p, m)}

    return run(program, ranks=p)


# ---- stages that cost the same ------------------------------------------------------------------------------------------------

WIDTH = 10
PRODUCT = 2 * WIDTH**3  # FLOPs of one product of WIDTH x WIDTH matrices: F takes one, B one, W one


class Product(nn.Module):
    """x (WIDTH, WIDTH) -> the same: one matrix product forward, and one for each gradient."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))

    def forward(self, x):
        return nn.functional.linear(x, self.weight)


def mean_square(y, targets):
    return (y - targets).square().mean()


def products(orders, m, v):
    """One step of stages that cost the same; the first one's input needs a gradient, so that its backward costs as much."""
    rank, p = dist.get_rank(), dist.get_world_size()
    stages = [pipeline.Stage([Product()], c * p + rank, p * v, torch.empty_like) for c in range(v)]
    x = torch.empty(m * WIDTH, WIDTH)
    microbatches = pipeline.split_into_microbatches(x, torch.empty(m * WIDTH, WIDTH), m)
    microbatches = [one._replace(inputs=one.inputs.detach().requires_grad_()) for one in microbatches]
    if isinstance(orders, str):
        {"GPipe": pipeline.gpipe_step, "1F1B": pipeline.one_f_one_b_step}[orders](stages[0], microbatches, mean_square)
    else:
        pipeline.run_schedule(stages, orders, microbatches, mean_square)
