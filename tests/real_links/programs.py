"""Programs that are measured on real links and replayed. Plain torch.distributed: each runs under gloo, recorded or not."""

import torch
import torch.distributed as dist

ELEMENTS = 2_000_000  # 8 MB


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


PROGRAMS = (ring_all_reduce, library_all_reduce, library_all_gather, chain_of_stages, there_and_back)
