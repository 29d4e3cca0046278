"""What the tests of the collectives run on ranks: every hand-written one beside the one line of torch.distributed.

Inputs are whole numbers from a generator seeded by rank and case: sums are exact in every order, and differ on every rank.
"""

import torch
import torch.distributed as dist
from torch.profiler import record_function

from lessons_lib.parallel import collectives as c

ALL_REDUCES = (
    "naive_all_reduce", "binomial_all_reduce", "ring_all_reduce", "whole_buffer_ring_all_reduce", "halving_doubling_all_reduce",
    "recursive_doubling_all_reduce",
)  # fmt: skip
BROADCASTS = ("naive_broadcast", "binomial_broadcast", "chain_broadcast")


def values(case, rank, shape, dtype=torch.float64, low=-9, high=10):
    """Whole numbers that depend on case and rank; exact in float64 whatever the order of adding."""
    generator = torch.Generator().manual_seed(1000 * case + rank)
    return torch.randint(low, high, shape if isinstance(shape, tuple) else (shape,), generator=generator).to(dtype)


def difference(name, case, ours, theirs):
    """A sentence where two tensors are not equal in every element, "" where they are."""
    rank = dist.get_rank()
    return "" if torch.equal(ours, theirs) else f"{name}, {case}, rank {rank}: {ours.tolist()} is not {theirs.tolist()}"


def each_equals_one_line(sizes):
    """Every collective for every size (elements, or a shape) and every root. Returns what differs: nothing, one hopes."""
    rank, n = dist.get_rank(), dist.get_world_size()
    wrong = []
    for case, size in enumerate(sizes):
        start = values(case, rank, size)
        told = f"size {size}"

        total = start.clone()
        dist.all_reduce(total)
        for name in ALL_REDUCES:
            x = start.clone()
            getattr(c, name)(x)
            wrong.append(difference(name, told, x, total))
        sums = total.view(-1).tensor_split(n)[rank]
        wrong.append(difference("ring_reduce_scatter", told, c.ring_reduce_scatter(start.clone()), sums))

        padded = torch.zeros(n * -(-start.numel() // n), dtype=start.dtype)
        padded[: start.numel()] = start.view(-1)
        gathered = [torch.empty_like(padded) for _ in range(n)]
        dist.all_gather(gathered, padded)
        gathered = [whole[: start.numel()] for whole in gathered]
        joined = torch.cat([whole.tensor_split(n)[r] for r, whole in enumerate(gathered)]).view(start.shape)
        x = start.clone()
        c.ring_all_gather(x)
        wrong.append(difference("ring_all_gather", told, x, joined))
        if n & (n - 1) == 0:
            x = start.clone()
            wrong.append(difference("halving", told, c.recursive_halving_reduce_scatter(x), sums))
            x = start.clone()
            c.recursive_doubling_all_gather(x)
            wrong.append(difference("doubling", told, x, joined))

        for root in range(n):
            told = f"size {size}, root {root}"
            theirs = start.clone()
            dist.broadcast(theirs, src=root)
            for name in BROADCASTS:
                x = start.clone()
                getattr(c, name)(x, root)
                wrong.append(difference(name, told, x, theirs))
            theirs = start.clone()
            dist.reduce(theirs, dst=root)
            for name in ("naive_reduce", "binomial_reduce"):
                x = start.clone()
                getattr(c, name)(x, root)
                wrong.append(difference(name, told, x, theirs if rank == root else start))
            for name in ("naive_scatter", "binomial_scatter"):
                x = start.clone()
                mine = getattr(c, name)(x, root)
                wrong.append(difference(name, told, mine, gathered[root].tensor_split(n)[rank]))
                same_memory = mine.numel() == 0 or mine.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
                wrong.append("" if same_memory else f"{name} returns a copy")
            for name in ("naive_gather", "binomial_gather"):
                x = start.clone()
                getattr(c, name)(x, root)
                if rank == root:
                    wrong.append(difference(name, told, x, joined))
    return list(filter(None, wrong))


def one_line_in_scatter_and_reduce_scatter(size):
    """Sizes that divide, against dist.scatter, dist.gather and dist.reduce_scatter themselves."""
    rank, n = dist.get_rank(), dist.get_world_size()
    start, wrong = values(7, rank, n * size), []
    theirs = torch.empty(size, dtype=start.dtype)
    dist.reduce_scatter_tensor(theirs, start.clone())
    wrong.append(difference("ring_reduce_scatter", size, c.ring_reduce_scatter(start.clone()), theirs))
    root = n - 1
    dist.scatter(theirs, list(start.clone().chunk(n)) if rank == root else None, src=root)
    wrong.append(difference("naive_scatter", size, c.naive_scatter(start.clone(), root), theirs))
    wrong.append(difference("binomial_scatter", size, c.binomial_scatter(start.clone(), root), theirs))
    parts = [torch.empty(size, dtype=start.dtype) for _ in range(n)] if rank == root else None
    dist.gather(start.chunk(n)[rank].clone(), parts, dst=root)
    for gather in (c.naive_gather, c.binomial_gather):
        x = start.clone()
        gather(x, root)
        if rank == root:
            wrong.append(difference(gather.__name__, size, x, torch.cat(parts)))
    return list(filter(None, wrong))


def all_to_all_equals_one_line(case):
    """Pieces of any size, some of them empty: rank r sends (3r + 5t + case) % 4 elements to rank t."""
    rank, n = dist.get_rank(), dist.get_world_size()
    lengths = [[(3 * r + 5 * t + case) % 4 for t in range(n)] for r in range(n)]
    out_lengths = [lengths[r][rank] for r in range(n)]
    start = values(case, rank, sum(lengths[rank]))
    theirs, ours = torch.empty(sum(out_lengths), dtype=start.dtype), torch.zeros(sum(out_lengths), dtype=start.dtype)
    dist.all_to_all_single(theirs, start, out_lengths, lengths[rank])
    c.all_to_all(list(ours.split(out_lengths)), list(start.split(lengths[rank])))
    return difference("all_to_all", case, ours, theirs)


def dtypes_and_operations(dtypes, reductions):
    rank, wrong = dist.get_rank(), []
    for dtype in dtypes:
        for op in reductions:
            if op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR) and dtype.is_floating_point:
                continue
            start = values(3, rank, 11, dtype, low=1, high=4)
            theirs = start.to(torch.float64 if dtype.is_floating_point else torch.int64, copy=True)
            dist.all_reduce(theirs, op=op)
            for name in ALL_REDUCES:
                x = start.clone()
                getattr(c, name)(x, op=op)
                wrong.append(difference(name, f"{dtype} {op}", x, theirs.to(dtype)))
    return list(filter(None, wrong))


def any_dtype_moves(dtypes):
    rank, wrong = dist.get_rank(), []
    for dtype in dtypes:
        start = values(5, rank, 10, torch.float32, low=0, high=2).to(dtype)
        for root in (0, 1):
            theirs = start.clone().view(torch.uint8)
            dist.broadcast(theirs, src=root)
            for name in BROADCASTS:
                x = start.clone()
                getattr(c, name)(x, root)
                wrong.append(difference(name, dtype, x.view(torch.uint8), theirs))
        x = start.clone()
        c.ring_all_gather(x)
        parts = [torch.empty_like(start).view(torch.uint8) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, start.view(torch.uint8))
        joined = torch.cat([p.view(dtype).tensor_split(len(parts))[r] for r, p in enumerate(parts)])
        wrong.append(difference("ring_all_gather", dtype, x.view(torch.uint8), joined.view(torch.uint8)))
    return list(filter(None, wrong))


def on_subgroups(groups, size):
    """Every all-reduce and every root within groups that do not begin at rank 0; other ranks run other groups meanwhile."""
    rank, wrong = dist.get_rank(), []
    made = [dist.new_group(members) for members in groups]
    for group in made:
        members = dist.get_process_group_ranks(group)  # in rising order, however they were given
        if rank not in members:
            continue
        start = values(9, rank, size)
        theirs = start.clone()
        dist.all_reduce(theirs, group=group)
        for name in ALL_REDUCES:
            x = start.clone()
            getattr(c, name)(x, group=group)
            wrong.append(difference(name, members, x, theirs))
        for root in range(len(members)):
            theirs = start.clone()
            dist.broadcast(theirs, src=members[root], group=group)
            for name in BROADCASTS:
                x = start.clone()
                getattr(c, name)(x, root, group=group)
                wrong.append(difference(name, members, x, theirs))
            x = start.clone()
            c.binomial_scatter(x, root, group)
            c.binomial_gather(x, root, group)
            wrong.append(difference("scatter and gather", members, x, start) if rank == members[root] else "")
    return list(filter(None, wrong))


def across_nodes(ranks_per_node, sizes):
    rank, wrong = dist.get_rank(), []
    inside, across = c.node_groups(ranks_per_node)
    for case, size in enumerate(sizes):
        start = values(case, rank, size)
        theirs = start.clone()
        dist.all_reduce(theirs)
        with record_function(f"size {size}"):
            x = start.clone()
            c.hierarchical_all_reduce(x, inside, across)
        wrong.append(difference("hierarchical_all_reduce", size, x, theirs))
    return list(filter(None, wrong))


def labelled(names, elements, ranks_per_node=None):
    """Each of these functions once, under its own name on the timeline, with a buffer of this many elements of 4 bytes."""
    groups = c.node_groups(ranks_per_node) if ranks_per_node else None
    n = dist.get_world_size()
    for name in names:
        x = torch.zeros(elements, dtype=torch.float32)
        with record_function(name):
            if name == "all_to_all":
                c.all_to_all(list(torch.zeros_like(x).chunk(n)), list(x.chunk(n)))
            elif name == "hierarchical_all_reduce":
                c.hierarchical_all_reduce(x, *groups)
            else:
                getattr(c, name)(x)
