"""Collectives with a root: broadcast, reduce, scatter, gather, from send and receive alone. Naive, by binomial tree, by chain.

`x` is the full buffer, S bytes, of the same size on all n ranks; chunk r belongs to rank r. `root` is a rank within the group.
Naive: the root speaks with one rank after the other. Binomial tree: whoever has something helps to pass it on, so the number of
ranks served doubles in each of ceil(log2 n) rounds.
Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from .messages import SUM, combine, distances, flat, pieces, position


def naive_broadcast(x, root=0, group=None):
    """Copy the root's `x` to all. n-1 messages of S bytes, all sent by the root, one after the other."""
    rank, n = position(group, root)
    if rank != root:
        dist.recv(flat(x), group_src=root, group=group)
    else:
        for other in range(n):
            if other != root:
                dist.send(flat(x), group_dst=other, group=group)


def binomial_broadcast(x, root=0, group=None):
    """Copy the root's `x` to all in ceil(log2 n) rounds. A rank sends at most that many messages of S bytes; n-1 in all."""
    rank, n = position(group, root)
    me = (rank - root) % n  # counted from the root
    for distance in distances(n):
        if me < distance and me + distance < n:
            dist.send(flat(x), group_dst=(rank + distance) % n, group=group)
        elif distance <= me < 2 * distance:
            dist.recv(flat(x), group_src=(rank - distance) % n, group=group)


def chain_broadcast(x, root=0, parts=8, group=None):
    """Copy the root's `x` to all, from neighbour to neighbour in `parts` parts: while one moves on, the next one comes in.

    Each rank but the last sends `parts` messages of S/parts bytes; n-2+parts steps.
    """
    rank, n = position(group, root)
    me, sent = (rank - root) % n, []
    for part in pieces(x, parts):
        if me > 0:
            dist.recv(part, group_src=(rank - 1) % n, group=group)
        if me < n - 1:
            sent.append(dist.isend(part, group_dst=(rank + 1) % n, group=group))
    for request in sent:
        request.wait()


def naive_reduce(x, root=0, op=SUM, group=None):
    """The root's `x` becomes the sum over all ranks; the others keep theirs. n-1 messages of S bytes, all received by the root."""
    rank, n = position(group, root)
    if rank != root:
        dist.send(flat(x), group_dst=root, group=group)
    else:
        incoming = torch.empty_like(flat(x))
        for other in range(n):
            if other != root:
                dist.recv(incoming, group_src=other, group=group)
                combine(flat(x), incoming, op)


def binomial_reduce(x, root=0, op=SUM, group=None):
    """The same in ceil(log2 n) rounds, a broadcast backwards: each rank but the root sends one message of S bytes."""
    rank, n = position(group, root)
    me, total = (rank - root) % n, flat(x).clone()
    incoming = torch.empty_like(total)
    for distance in distances(n):
        if me % (2 * distance) == distance:
            dist.send(total, group_dst=(rank - distance) % n, group=group)
            return
        if me + distance < n:
            dist.recv(incoming, group_src=(rank + distance) % n, group=group)
            combine(total, incoming, op)
    flat(x).copy_(total)


def naive_scatter(x, root=0, group=None):
    """Chunk r of the root's `x` goes to rank r. n-1 messages of S/n bytes, all sent by the root. Returns this rank's chunk of x."""
    rank, n = position(group, root)
    chunks = pieces(x, n)
    if rank != root:
        dist.recv(chunks[rank], group_src=root, group=group)
    else:
        for other in range(n):
            if other != root:
                dist.send(chunks[other], group_dst=other, group=group)
    return chunks[rank]


def naive_gather(x, root=0, group=None):
    """Chunk r of rank r's `x` goes to the root's `x`. n-1 messages of S/n bytes, all received by the root."""
    rank, n = position(group, root)
    chunks = pieces(x, n)
    if rank != root:
        dist.send(chunks[rank], group_dst=root, group=group)
    else:
        for other in range(n):
            if other != root:
                dist.recv(chunks[other], group_src=other, group=group)


def binomial_scatter(x, root=0, group=None):
    """The same as naive_scatter in ceil(log2 n) rounds: first half of the chunks to the rank half way round, and so on.

    The root sends (n-1)/n x S bytes in ceil(log2 n) messages. `x` is workspace: it holds other ranks' chunks afterwards.
    """
    rank, n = position(group, root)
    chunks = pieces(x, n)
    me, chunks_from_root = (rank - root) % n, [chunks[(root + k) % n] for k in range(n)]
    for distance in reversed(distances(n)):
        if me % (2 * distance) == distance:
            mine = chunks_from_root[me : me + distance]
            message = torch.cat(mine)
            dist.recv(message, group_src=(rank - distance) % n, group=group)
            unpack(message, mine)
        elif me % (2 * distance) == 0 and me + distance < n:
            theirs = chunks_from_root[me + distance : me + 2 * distance]
            dist.send(torch.cat(theirs), group_dst=(rank + distance) % n, group=group)
    return chunks[rank]


def binomial_gather(x, root=0, group=None):
    """The same as naive_gather in ceil(log2 n) rounds, a scatter backwards. The root receives (n-1)/n x S bytes.

    Each rank but the root sends one message. `x` is workspace: it holds other ranks' chunks afterwards.
    """
    rank, n = position(group, root)
    chunks = pieces(x, n)
    me, chunks_from_root = (rank - root) % n, [chunks[(root + k) % n] for k in range(n)]
    for distance in distances(n):
        if me % (2 * distance) == distance:
            dist.send(torch.cat(chunks_from_root[me : me + distance]), group_dst=(rank - distance) % n, group=group)
            return
        if me + distance < n:
            theirs = chunks_from_root[me + distance : me + 2 * distance]
            message = torch.cat(theirs)
            dist.recv(message, group_src=(rank + distance) % n, group=group)
            unpack(message, theirs)


def unpack(message, chunks) -> None:
    """Copy a message of several chunks to where they belong."""
    for chunk, values in zip(chunks, message.split([chunk.numel() for chunk in chunks])):
        chunk.copy_(values)
