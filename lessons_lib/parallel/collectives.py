"""Collectives from scratch, from send and receive alone: the ring, recursive halving and doubling, hierarchical, all-to-all.

`x` is the full buffer, S bytes, of the same size on all n ranks; chunk r belongs to rank r and is S/n bytes (one element more or
less where n does not divide). All work in place, on any group, and return what they say. Those with a root are in `rooted` and
can be had from here as well.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from .messages import SUM, combine, distances, exchange, flat, one_each, pieces, position
from .rooted import (
    binomial_broadcast,
    binomial_gather,
    binomial_reduce,
    binomial_scatter,
    chain_broadcast,
    naive_broadcast,
    naive_gather,
    naive_reduce,
    naive_scatter,
)

__all__ = [
    "all_to_all", "binomial_all_reduce", "binomial_broadcast", "binomial_gather", "binomial_reduce", "binomial_scatter",
    "chain_broadcast", "halving_doubling_all_reduce", "hierarchical_all_reduce", "naive_all_reduce", "naive_broadcast",
    "naive_gather", "naive_reduce", "naive_scatter", "node_groups", "recursive_doubling_all_gather",
    "recursive_doubling_all_reduce", "recursive_halving_reduce_scatter", "ring_all_gather", "ring_all_reduce",
    "ring_reduce_scatter", "whole_buffer_ring_all_reduce",
]  # fmt: skip


# ---- the ring ------------------------------------------------------------------------------------------------------------


def ring_reduce_scatter(x, op=SUM, group=None):
    """Add up: this rank's chunk of `x` becomes the sum over all ranks, and is returned; other chunks hold partial sums.

    n-1 steps; in each, every rank sends one chunk to its right neighbour: (n-1)/n x S bytes.
    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009.
    """
    rank, n = position(group)
    chunks = pieces(x, n)
    for step in range(n - 1):
        outgoing, total = chunks[(rank - step - 1) % n], chunks[(rank - step - 2) % n]
        incoming = torch.empty_like(total)
        exchange(outgoing, (rank + 1) % n, incoming, (rank - 1) % n, group)
        combine(total, incoming, op)
    return chunks[rank]


def ring_all_gather(x, group=None):
    """Hand round: every chunk of `x` becomes that of the rank it belongs to.

    n-1 steps; in each, every rank passes on the chunk that it received last: (n-1)/n x S bytes. Source: as above.
    """
    rank, n = position(group)
    chunks = pieces(x, n)
    for step in range(n - 1):
        outgoing, incoming = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        exchange(outgoing, (rank + 1) % n, incoming, (rank - 1) % n, group)


def ring_all_reduce(x, op=SUM, group=None):
    """`x` becomes the sum over all ranks: 2(n-1) messages of S/n, 2(n-1)/n x S bytes a rank. Source: as above."""
    ring_reduce_scatter(x, op, group)
    ring_all_gather(x, group)


def whole_buffer_ring_all_reduce(x, op=SUM, group=None):
    """The ring without chunks, for comparison: whole buffers go round, everybody adds what passes. n-1 messages of S bytes."""
    rank, n = position(group)
    outgoing = flat(x).clone()
    for _ in range(n - 1):
        incoming = torch.empty_like(outgoing)
        exchange(outgoing, (rank + 1) % n, incoming, (rank - 1) % n, group)
        combine(flat(x), incoming, op)
        outgoing = incoming


# ---- through a root --------------------------------------------------------------------------------------------------------


def naive_all_reduce(x, op=SUM, group=None):
    """Everybody sends S bytes to rank 0, which adds and sends S bytes to everybody: 2(n-1) steps."""
    naive_reduce(x, 0, op, group)
    naive_broadcast(x, 0, group)


def binomial_all_reduce(x, op=SUM, group=None):
    """Up a binomial tree and down again: 2 ceil(log2 n) steps, each of S bytes."""
    binomial_reduce(x, 0, op, group)
    binomial_broadcast(x, 0, group)


# ---- recursive halving and doubling ------------------------------------------------------------------------------------------


def recursive_halving_reduce_scatter(x, op=SUM, group=None):
    """The same as ring_reduce_scatter in log2 n steps, for n a power of two: swap halves, then quarters, with ever nearer ranks.

    Each rank sends (n-1)/n x S bytes in log2 n messages. Source: Thakur, Rabenseifner, Gropp, 2005.
    """
    rank, n = position(group)
    _power_of_two(n)
    halve(x, rank, n, op, group)
    return pieces(x, n)[rank]


def recursive_doubling_all_gather(x, group=None):
    """The same as ring_all_gather in log2 n steps, for n a power of two: swap a chunk, then two, with ever farther ranks.

    Each rank sends (n-1)/n x S bytes in log2 n messages. Source: as above.
    """
    rank, n = position(group)
    _power_of_two(n)
    double(x, rank, n, group)


def halving_doubling_all_reduce(x, op=SUM, group=None):
    """`x` becomes the sum over all ranks: halving, then doubling: 2 log2 n messages, 2(n-1)/n x S bytes a rank.

    Where n is no power of two, the ranks from p = 2^floor(log2 n) on are guests: each adds its buffer to that of a host, p ranks
    below, and gets the result from it: two more steps of S bytes. Source: Rabenseifner, "Optimization of collective reduction
    operations", 2004.
    """

    def halve_and_double(rank, p):
        halve(x, rank, p, op, group)
        double(x, rank, p, group)

    _with_guests(x, op, group, halve_and_double)


def recursive_doubling_all_reduce(x, op=SUM, group=None):
    """`x` becomes the sum over all ranks: swap whole buffers with ranks 1, 2, 4, ... away: log2 n messages of S bytes.

    The fewest steps, the most bytes: for small buffers. Other n than powers of two as in halving_doubling_all_reduce.
    Source: as above.
    """

    def swap_whole_buffers(rank, p):
        incoming = torch.empty_like(flat(x))
        for distance in distances(p):
            exchange(flat(x), rank ^ distance, incoming, rank ^ distance, group)
            combine(flat(x), incoming, op)

    _with_guests(x, op, group, swap_whole_buffers)


def halve(x, rank, n, op=SUM, group=None):
    """Reduce-scatter among ranks 0 to n-1, n a power of two: swap halves of what is left with a rank half as far away."""
    first, last = 0, n  # the chunks that this rank still adds up
    while last - first > 1:
        half = (last - first) // 2
        low, high = span(x, n, first, first + half), span(x, n, first + half, last)
        if rank < first + half:
            keep, give, partner, last = low, high, rank + half, first + half
        else:
            keep, give, partner, first = high, low, rank - half, first + half
        incoming = torch.empty_like(keep)
        exchange(give, partner, incoming, partner, group)
        combine(keep, incoming, op)


def double(x, rank, n, group=None):
    """All-gather among ranks 0 to n-1, n a power of two: swap all that is there with a rank twice as far away."""
    for distance in distances(n):
        partner = rank ^ distance
        mine = rank // distance * distance  # the first chunk of those that are here
        theirs = mine ^ distance
        outgoing = span(x, n, mine, mine + distance)
        incoming = span(x, n, theirs, theirs + distance)
        exchange(outgoing, partner, incoming, partner, group)


def span(x, n, first, last):
    """Chunks first to last - 1 of n, as one row of elements that shares the memory of `x`."""
    lengths = [chunk.numel() for chunk in pieces(x, n)]
    return flat(x)[sum(lengths[:first]) : sum(lengths[:last])]


def _with_guests(x, op, group, all_reduce):
    rank, n = position(group)
    p = 1 << (n.bit_length() - 1)
    if rank >= p:
        dist.send(flat(x), group_dst=rank - p, group=group)
        dist.recv(flat(x), group_src=rank - p, group=group)
        return
    if rank + p < n:
        incoming = torch.empty_like(flat(x))
        dist.recv(incoming, group_src=rank + p, group=group)
        combine(flat(x), incoming, op)
    all_reduce(rank, p)
    if rank + p < n:
        dist.send(flat(x), group_dst=rank + p, group=group)


def _power_of_two(n) -> None:
    if n & (n - 1):
        raise ValueError(
            f"The group has {n} ranks, but halving and doubling need 2, 4, 8, 16, ...: use the ring, which takes any number."
        )


# ---- several nodes -----------------------------------------------------------------------------------------------------------


def hierarchical_all_reduce(x, inside, across, op=SUM):
    """`x` becomes the sum over all ranks of m nodes with k ranks each; only S/k of each rank's buffer goes over the network.

    Reduce-scatter inside the node, all-reduce of this rank's chunk across nodes, all-gather inside. Each rank sends
    2(k-1)/k x S bytes inside its node and 2(m-1)/m x S/k across. The groups are those of `node_groups`.
    Source: Mikami et al., arXiv:1811.05233 (a grid of ranks); levels as such: Jia et al., arXiv:1807.11205.
    """
    mine = ring_reduce_scatter(x, op, inside)
    ring_all_reduce(mine, op, across)
    ring_all_gather(x, inside)


def node_groups(ranks_per_node):
    """(inside, across): the group of this rank's node, and that of the ranks with the same place on every node.

    Every rank must call it, once. Ranks fill one node after the other, as torchrun numbers them.
    """
    n = dist.get_world_size()
    if isinstance(ranks_per_node, bool) or not isinstance(ranks_per_node, int):
        raise TypeError(f"ranks_per_node is {ranks_per_node!r}, but must be a whole number that divides the {n} ranks.")
    if ranks_per_node < 1 or n % ranks_per_node:
        raise ValueError(
            f"ranks_per_node is {ranks_per_node}, but must be a whole number from 1 to {n} that divides the {n} ranks."
        )
    nodes = [list(range(first, first + ranks_per_node)) for first in range(0, n, ranks_per_node)]
    inside, _ = dist.new_subgroups_by_enumeration(nodes)
    across, _ = dist.new_subgroups_by_enumeration([list(same_place) for same_place in zip(*nodes)])
    return inside, across


# ---- all to all --------------------------------------------------------------------------------------------------------------


def all_to_all(outputs, inputs, group=None):
    """inputs[r] goes to rank r; outputs[r] comes from rank r. n-1 steps, each with another partner; sizes may differ.

    With S bytes in all inputs together each rank sends (n-1)/n x S bytes in n-1 messages.
    Source: Thakur, Rabenseifner, Gropp, 2005 (pairwise exchange).
    """
    rank, n = position(group)
    one_each(n, outputs=outputs, inputs=inputs)
    flat(outputs[rank]).copy_(flat(inputs[rank]))
    for step in range(1, n):
        to, source = (rank + step) % n, (rank - step) % n
        exchange(flat(inputs[to]), to, flat(outputs[source]), source, group)
