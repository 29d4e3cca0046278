"""Closed forms: how long a collective takes, how much each rank sends, and how bandwidth is counted. One function each.

Everything here is predicted, not measured. Times are in seconds; `nbytes` is the full buffer as nccl-tests counts it
(all-gather: the output; reduce-scatter: the input; gather and scatter: the total; all-to-all: one rank's whole send buffer);
`bandwidth` is in bytes/s per direction per device and may be a numpy array; `latency` is in seconds per message and may be one.

The model is "alpha-beta": a message costs latency + bytes / bandwidth, and a device sends one and receives one at a time.
[Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005]
"""

from __future__ import annotations

import numpy as np

from .hardware import Cluster, number, whole

ALGORITHMS = ("ring", "tree")
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter", "all_to_all", "barrier")
LARGEST_GROUP = 1_000_000


# ---- one kind of link --------------------------------------------------------------------------------------------------


def ring_all_reduce(nbytes, members, bandwidth, latency=0.0):
    """2(n-1) x latency + 2(n-1)/n x bytes / bandwidth: a reduce-scatter, then an all-gather, each n-1 messages of bytes/n.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009.
    """
    return _checked(_ring_all_reduce, nbytes, members, bandwidth, latency)


def tree_all_reduce(nbytes, members, bandwidth, latency=0.0):
    """2 ceil(log2 n) x latency + 2 x bytes / bandwidth: up and down two trees at once, each carrying half, in many small pieces.

    Pieces are so small that filling the pipe costs latency alone. Beats the ring where latency dominates, from 4 members on.
    Source: Sanders, Speck, Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009 (NCCL's trees).
    """
    return _checked(_tree_all_reduce, nbytes, members, bandwidth, latency)


def reduce_scatter(nbytes, members, bandwidth, latency=0.0):
    """(n-1) x latency + (n-1)/n x bytes / bandwidth: the first half of the ring all-reduce. Source: Thakur et al., 2005."""
    return _checked(_share_ring, nbytes, members, bandwidth, latency)


def all_gather(nbytes, members, bandwidth, latency=0.0):
    """(n-1) x latency + (n-1)/n x bytes / bandwidth: the second half of the ring all-reduce. Source: Thakur et al., 2005."""
    return _checked(_share_ring, nbytes, members, bandwidth, latency)


def broadcast(nbytes, members, bandwidth, latency=0.0):
    """(n-1) x latency + bytes / bandwidth: from neighbour to neighbour, in pieces so small that they follow each other closely.

    Source: nccl-tests, PERFORMANCE.md (bytes / bandwidth), plus one latency a hop.
    """
    return _checked(_chain, nbytes, members, bandwidth, latency)


def tree_broadcast(nbytes, members, bandwidth, latency=0.0):
    """ceil(log2 n) x latency + bytes / bandwidth: down two trees at once. Source: Sanders, Speck, Traeff, 2009."""
    return _checked(_tree_chain, nbytes, members, bandwidth, latency)


def reduce(nbytes, members, bandwidth, latency=0.0):
    """(n-1) x latency + bytes / bandwidth: a broadcast backwards. Source: nccl-tests, PERFORMANCE.md."""
    return _checked(_chain, nbytes, members, bandwidth, latency)


def gather(nbytes, members, bandwidth, latency=0.0):
    """(n-1) x (latency + bytes/n / bandwidth): the root receives one piece after the other. `nbytes` is the total."""
    return _checked(_share_ring, nbytes, members, bandwidth, latency)


def scatter(nbytes, members, bandwidth, latency=0.0):
    """(n-1) x (latency + bytes/n / bandwidth): the root sends one piece after the other. `nbytes` is the total."""
    return _checked(_share_ring, nbytes, members, bandwidth, latency)


def all_to_all(nbytes, members, bandwidth, latency=0.0):
    """(n-1) x (latency + bytes/n / bandwidth): every rank exchanges one piece with each other rank in turn.

    `nbytes` is one rank's whole send buffer; where ranks differ, the largest. Source: Thakur et al., 2005 (pairwise exchange).
    """
    return _checked(_share_ring, nbytes, members, bandwidth, latency)


def barrier(members, latency):
    """ceil(log2 n) x latency: in each round everybody tells one more rank, twice as far away.

    Source: Hensgen, Finkel, Manber, "Two algorithms for barrier synchronization", 1988.
    """
    return _checked(_barrier, 0, members, 1.0, latency)


def crossover(members, bandwidth, latency):
    """n x latency x bandwidth, in bytes: the buffer at which the two terms of the ring all-reduce are equal.

    A smaller one is dominated by latency (and there trees win), a larger one by bandwidth.
    """
    return _checked(lambda nbytes, n, bandwidth, latency: n * latency * bandwidth, 0, members, bandwidth, latency)


def _ring_all_reduce(nbytes, n, bandwidth, latency):
    return 2 * (n - 1) * (latency + nbytes / n / bandwidth)


def _tree_all_reduce(nbytes, n, bandwidth, latency):
    return 2 * _rounds(n) * latency + (2 if n > 1 else 0) * nbytes / bandwidth


def _share_ring(nbytes, n, bandwidth, latency):
    return (n - 1) * (latency + nbytes / n / bandwidth)


def _chain(nbytes, n, bandwidth, latency):
    return (n - 1) * latency + min(n - 1, 1) * nbytes / bandwidth


def _tree_chain(nbytes, n, bandwidth, latency):
    return _rounds(n) * latency + min(n - 1, 1) * nbytes / bandwidth


def _barrier(nbytes, n, bandwidth, latency):
    return _rounds(n) * latency


def _rounds(n: int) -> int:
    """ceil(log2 n), exactly."""
    return (n - 1).bit_length()


_SHARES = dict.fromkeys(("reduce_scatter", "all_gather", "gather", "scatter", "all_to_all"), _share_ring) | {"barrier": _barrier}
_FLAT = {
    "ring": _SHARES | {"all_reduce": _ring_all_reduce, "broadcast": _chain, "reduce": _chain},
    "tree": _SHARES | {"all_reduce": _tree_all_reduce, "broadcast": _tree_chain, "reduce": _tree_chain},
}


# ---- a whole cluster -----------------------------------------------------------------------------------------------------


def hierarchical_all_reduce(
    nbytes, members_per_node, nodes, intra_bandwidth, inter_bandwidth, intra_latency=0.0, inter_latency=0.0
):
    """Reduce-scatter inside every node, all-reduce of bytes/k across nodes by each of its k members at once, all-gather inside.

    Over the network each device sends 2(m-1)/m x bytes/k, with m nodes. Source: Mikami et al., arXiv:1811.05233
    (a grid of ranks); levels as such: Jia et al., arXiv:1807.11205.
    """
    k = whole(members_per_node, "The number of members per node", 1, LARGEST_GROUP)
    m = whole(nodes, "The number of nodes", 1, LARGEST_GROUP)
    nbytes = _bytes(nbytes)
    intra = (_positive(intra_bandwidth, "The bandwidth inside a node"), _latency(intra_latency))
    inter = (_positive(inter_bandwidth, "The bandwidth across nodes"), _latency(inter_latency))
    return price("all_reduce", nbytes, (k * m, m, k, k), intra, inter)


def collective_time(op, nbytes, members, cluster: Cluster, algorithm="ring"):
    """Seconds for one collective of `members` (ranks, or how many: then the first ones) on a cluster.

    Members of one node use its inner link; one member per node: the network; several on several nodes: a hierarchical algorithm.
    `algorithm` is "ring" or "tree"; a tree serves all_reduce, broadcast and reduce; for the others both mean the same.
    """
    check_algorithm(algorithm)
    if op not in COLLECTIVES:
        raise ValueError(f"{op!r} is not a collective that has a formula; choose one of {', '.join(COLLECTIVES)}.")
    if not isinstance(cluster, Cluster):
        raise TypeError(f"The cluster must be a hardware.Cluster, not {cluster!r}.")
    if not isinstance(members, (list, tuple, range, np.ndarray)):
        members = range(whole(members, "The number of members", 1, cluster.world_size, " (the cluster's size)"))
    if len(set(members)) != len(members) or not len(members):
        raise ValueError(f"The members of a group are different ranks, at least one, not {list(members)!r}.")
    shape = group_shape([cluster.node_of(rank) for rank in members])
    intra, inter = cluster.intra_node, cluster.inter_node
    return price(op, _bytes(nbytes), shape, (intra.bandwidth, intra.latency), (inter.bandwidth, inter.latency), algorithm)


def group_shape(nodes) -> tuple[int, int, int, int]:
    """(members, nodes, fewest members on a node, most members on a node) of a group, from the node of each member."""
    counts = np.unique(np.asarray(nodes), return_counts=True)[1]
    return int(counts.sum()), len(counts), int(counts.min()), int(counts.max())


def price(op, nbytes, shape, intra, inter, algorithm="ring"):
    """`collective_time` without checks. `shape` as of `group_shape`; `intra`, `inter`: (bandwidth, latency), numbers or arrays.

    Where nodes have unequal numbers of members, the phase inside a node takes as long as on the fullest node, and the network
    phase as long as on the emptiest one, whose few members carry the most each. A phase starts when the one before has ended.
    """
    n, m, fewest, most = shape
    if n == 1:
        return 0.0
    flat = _FLAT[algorithm][op]
    if m == 1:
        return flat(nbytes, n, *intra)
    if most == 1:
        return flat(nbytes, n, *inter)
    if op == "barrier":
        return _barrier(0, most, *intra) + _barrier(0, m, *inter)
    if op in ("gather", "scatter", "all_to_all"):  # one rank's pieces: those for its own node, then those for the others
        piece = nbytes / n
        return (most - 1) * (intra[1] + piece / intra[0]) + (n - fewest) * (inter[1] + piece / inter[0])
    inside = _share_ring(nbytes, most, *intra)
    across = flat(nbytes / fewest, m, *inter)
    return inside + across if op in ("reduce_scatter", "all_gather") else inside + across + inside


# ---- counting bytes and bandwidth ------------------------------------------------------------------------------------------


def bytes_sent(op, nbytes, members):
    """Bytes that the busiest rank sends: all-reduce 2(n-1)/n x bytes; reduce-scatter, all-gather, all-to-all (n-1)/n x bytes.

    Broadcast and reduce: bytes, once along the chain. Scatter: (n-1)/n x bytes by the root. Gather: 1/n x bytes by each other rank.
    Source: the algorithms named above.
    """
    n, nbytes = _members(members), _bytes(nbytes)
    if op == "gather":
        return min(n - 1, 1) * nbytes / n
    return bus_factor(op, n) * nbytes * min(n - 1, 1)


def bus_factor(op, members):
    """busbw / algbw: 2(n-1)/n for all-reduce, 1 for broadcast and reduce, (n-1)/n for the others.

    Source: nccl-tests, PERFORMANCE.md. A barrier moves no data and has 0.
    """
    n = _members(members)
    if op not in COLLECTIVES:
        raise ValueError(f"{op!r} is not a collective that has a formula; choose one of {', '.join(COLLECTIVES)}.")
    if op == "barrier":
        return 0.0
    return {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0, "reduce": 1.0}.get(op, (n - 1) / n)


def algbw(nbytes, seconds):
    """Algorithm bandwidth, bytes/s: bytes of the full buffer / time. Source: nccl-tests, PERFORMANCE.md."""
    return _bytes(nbytes) / _positive(seconds, "The time", "a positive, finite number of seconds")


def busbw(op, nbytes, members, seconds):
    """Bus bandwidth, bytes/s: algbw x bus_factor. It can be held against the link's bandwidth whatever the group's size."""
    return algbw(nbytes, seconds) * bus_factor(op, members)


# ---- checks ----------------------------------------------------------------------------------------------------------------


def check_algorithm(algorithm) -> None:
    """ValueError unless `algorithm` is one of ALGORITHMS."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"There is no algorithm {algorithm!r} for collectives; choose 'ring' or 'tree'.")


def check_alpha_beta(nbytes, bandwidth, latency):
    """The three as numbers or arrays. TypeError or ValueError names the one that is not allowed."""
    return _bytes(nbytes), _positive(bandwidth, "The bandwidth"), _latency(latency)


def _checked(formula, nbytes, members, bandwidth, latency):
    return formula(_bytes(nbytes), _members(members), _positive(bandwidth, "The bandwidth"), _latency(latency))


def _members(members) -> int:
    return whole(members, "The number of members", 1, LARGEST_GROUP)


def _bytes(nbytes):
    return numbers(nbytes, "The number of bytes", "a finite number of bytes, 0 or more", closed=True)


def _latency(latency):
    return numbers(latency, "The latency", "a finite number of seconds, 0 or more", closed=True)


def _positive(value, what, allowed="a positive, finite number of bytes per second"):
    return numbers(value, what, allowed, closed=False)


def numbers(value, what, allowed, closed):
    """A number, or an array of numbers: above 0, or 0 too if `closed`. TypeError or ValueError says what is allowed."""
    if not isinstance(value, (np.ndarray, list, tuple)):
        return number(value, what, allowed, closed=closed)
    array = np.asarray(value)
    if array.dtype.kind not in "iuf" or not array.size:
        raise TypeError(f"{what} must be {allowed}, or an array of such numbers that is not empty, not {value!r}.")
    array = array.astype(float)
    bad = ~np.isfinite(array) | (array < 0 if closed else array <= 0)
    if bad.any():
        raise ValueError(f"{what} has the value {array[bad][0].item()!r} among others, but each must be {allowed}.")
    return array
