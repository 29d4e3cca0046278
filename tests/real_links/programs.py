"""Programs that are measured on real links and replayed. Plain torch.distributed: each runs under gloo, recorded or not."""

import functools
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))
from lessons_lib.parallel import data  # noqa: E402

ELEMENTS = 2_000_000  # 8 MB
WIDTH, LAYERS, ROWS = 512, 6, 512  # of the model whose gradients are averaged: 6 x 1 MB


def ring_all_reduce(elements=ELEMENTS):
    """The chunked ring, written by hand: reduce-scatter, then all-gather."""
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = list(torch.ones(elements).chunk(n))
    for step in range(2 * (n - 1)):
        incoming = torch.empty_like(chunks[0])
        handle = dist.isend(chunks[(rank - step) % n], (rank + 1) % n)
        dist.recv(incoming, (rank - 1) % n)
        handle.wait()
        if step < n - 1:
            chunks[(rank - step - 1) % n] += incoming
        else:
            chunks[(rank - step - 1) % n] = incoming
    return chunks[0][0].item()


def library_all_reduce(elements=ELEMENTS):
    x = torch.ones(elements)
    dist.all_reduce(x)
    return x[0].item()


def library_all_gather(elements=ELEMENTS):
    n = dist.get_world_size()
    whole = [torch.empty(elements // n) for _ in range(n)]
    dist.all_gather(whole, torch.full((elements // n,), 1.0))
    return sum(part[0].item() for part in whole)


def chain_of_stages(elements=ELEMENTS, microbatches=4):
    """A pipeline's forward pass: every stage hands each microbatch on to the next."""
    rank, n = dist.get_rank(), dist.get_world_size()
    piece = torch.ones(elements // microbatches)
    for _ in range(microbatches):
        if rank > 0:
            dist.recv(piece, rank - 1)
        if rank < n - 1:
            dist.send(piece, rank + 1)
    return float(n)


def there_and_back(elements=ELEMENTS):
    rank = dist.get_rank()
    x = torch.ones(elements)
    if rank == 0:
        dist.send(x, 1)
        dist.recv(x, 1)
    elif rank == 1:
        dist.recv(x, 0)
        dist.send(x, 0)
    return float(dist.get_world_size())


@functools.cache  # made once: only training is timed
def model_and_rows():
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    for layer in model:
        nn.init.constant_(layer.weight, 1 / WIDTH)
    return model, torch.ones(ROWS, WIDTH)


def gradient_of_step(before=None, after=None):
    """Forward and backward of one step, with what is to happen before and after; returns the sum of the gradients."""
    model, rows = model_and_rows()
    model.zero_grad()
    started = before(model) if before else None
    model(rows).sum().backward()
    if after:
        after(model, started)
    return sum(p.grad.sum().item() for p in model.parameters())


def computing_alone():
    """What data_parallel_flat and data_parallel_buckets compute, without any message."""
    gradient_of_step()
    return 0.0


def data_parallel_flat():
    """All gradients in one buffer after backward: nothing is hidden."""
    return gradient_of_step(after=lambda model, _: data.average_gradients_flat(model, 1 / dist.get_world_size()))


def data_parallel_buckets():
    """A bucket a layer: all-reduces travel while backward goes on."""

    def finish(model, buckets):
        buckets.wait()
        buckets.remove()

    return gradient_of_step(lambda model: data.Buckets(model, 4 * WIDTH**2), finish)


PROGRAMS = (
    ring_all_reduce, library_all_reduce, library_all_gather, chain_of_stages, there_and_back, data_parallel_flat,
    data_parallel_buckets,
)  # fmt: skip
COMPUTING = (data_parallel_flat, data_parallel_buckets)  # whose computing takes long enough to be measured by itself
