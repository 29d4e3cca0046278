"""Plausible wrong answers to the exercises of lesson 02."""

import torch
import torch.distributed as dist
from collecting import wrong

from lessons_lib.parallel import collectives


def swap(outgoing, destination, incoming, source):
    sending = dist.isend(outgoing, destination)
    dist.recv(incoming, source)
    sending.wait()
    return incoming


def here():
    rank, n = dist.get_rank(), dist.get_world_size()
    return rank, n, (rank - 1) % n, (rank + 1) % n


# ---- pass_left -----------------------------------------------------------------------------------------------------


@wrong("pass_left", "runs to the right")
def pass_right(mine):
    rank, n, left, right = here()
    return swap(mine, right, torch.empty_like(mine), left)


@wrong("pass_left", "These ranks wait for something that cannot come")
def all_send_first(mine):
    rank, n, left, right = here()
    dist.send(mine, left)
    theirs = torch.empty_like(mine)
    dist.recv(theirs, right)
    return theirs


@wrong("pass_left", "they take 2 steps")
def parity_order(mine):
    rank, n, left, right = here()
    theirs = torch.empty_like(mine)
    if rank % 2 == 0:
        dist.send(mine, left)
        dist.recv(theirs, right)
    else:
        dist.recv(theirs, right)
        dist.send(mine, left)
    return theirs


@wrong("pass_left", "raised ValueError")
def no_modulo(mine):
    rank, n, left, right = here()
    return swap(mine, rank - 1, torch.empty_like(mine), rank + 1)


@wrong("pass_left", "These are its own numbers")
def own(mine):
    return mine.clone()


@wrong("pass_left", "calls dist.all_gather")
def gathered(mine):
    rank, n, left, right = here()
    everything = [torch.empty_like(mine) for _ in range(n)]
    dist.all_gather(everything, mine)
    return everything[right]


# ---- left_all_gather -----------------------------------------------------------------------------------------------


def gather_ring(mine, length, first=0, steps=None, to_the_right=False):
    rank, n, left, right = here()
    whole = torch.zeros(length)
    pieces = whole.tensor_split(n)
    pieces[rank].copy_(mine)
    for step in range(n - 1 if steps is None else steps(n)):
        if to_the_right:
            swap(pieces[(rank - step) % n], right, pieces[(rank - step - 1) % n], left)
        else:
            swap(pieces[(rank + step + first) % n], left, pieces[(rank + step + 1 + first) % n], right)
    return whole


@wrong("left_all_gather", "Your ring runs to the right; this one")
def to_the_right(mine, length):
    return gather_ring(mine, length, to_the_right=True)


@wrong("left_all_gather", "calls dist.all_gather")
def library(mine, length):
    pieces = list(torch.empty(length).tensor_split(dist.get_world_size()))
    most = len(pieces[0])
    padded = torch.zeros(most)
    padded[: len(mine)] = mine
    everything = [torch.empty(most) for _ in pieces]
    dist.all_gather(everything, padded)
    return torch.cat([whole[: len(piece)] for whole, piece in zip(everything, pieces)])


@wrong("left_all_gather", "A message and its buffer differ")
def equal_sizes(mine, length):
    rank, n, left, right = here()
    pieces = [torch.empty_like(mine) for _ in range(n)]
    pieces[rank].copy_(mine)
    for step in range(n - 1):
        swap(pieces[(rank + step) % n], left, pieces[(rank + step + 1) % n], right)
    return torch.cat(pieces)


@wrong("left_all_gather", "the last of yours brings what is there already")
def one_step_more(mine, length):
    return gather_ring(mine, length, steps=lambda n: n)


@wrong("left_all_gather", "Missing or wrong: piece 2, 3.")
def one_step_only(mine, length):
    return gather_ring(mine, length, steps=lambda n: min(n - 1, 1))


@wrong("left_all_gather", "which piece does a rank pass on")
def stored_in_the_wrong_place(mine, length):
    rank, n, left, right = here()
    pieces = list(torch.empty(length).tensor_split(n))
    received = [mine]
    for step in range(n - 1):
        received.append(swap(received[-1], left, torch.empty_like(pieces[(rank + step + 1) % n]), right))
    return torch.cat(received)[:length]


@wrong("left_all_gather", "Whole buffers went round")
def whole_buffers(mine, length):
    rank, n, left, right = here()
    whole = torch.zeros(length)
    whole.tensor_split(n)[rank].copy_(mine)
    passing = whole.clone()
    for _ in range(n - 1):
        passing = swap(passing, left, torch.empty_like(whole), right)
        whole += passing
    return whole


@wrong("left_all_gather", "In a ring everything goes to the left neighbour")
def direct_to_everybody(mine, length):
    rank, n, left, right = here()
    pieces = list(torch.empty(length).tensor_split(n))
    pieces[rank].copy_(mine)
    for distance in range(1, n):
        swap(mine, (rank - distance) % n, pieces[(rank + distance) % n], (rank + distance) % n)
    return torch.cat(pieces)


@wrong("left_all_gather", "Only its own piece is there")
def own_piece_only(mine, length):
    return gather_ring(mine, length, steps=lambda n: 0)


@wrong("left_all_gather", "one after the other")
def in_turns(mine, length):
    rank, n, left, right = here()
    pieces = list(torch.empty(length).tensor_split(n))
    pieces[rank].copy_(mine)
    for step in range(n - 1):
        outgoing, incoming = pieces[(rank + step) % n], pieces[(rank + step + 1) % n]
        if rank % 2 == 0:
            dist.send(outgoing, left)
            dist.recv(incoming, right)
        else:
            dist.recv(incoming, right)
            dist.send(outgoing, left)
    return torch.cat(pieces)


# ---- left_reduce_scatter -------------------------------------------------------------------------------------------


def reduce_ring(x, first=1, add=True, steps=None):
    rank, n, left, right = here()
    pieces = x.tensor_split(n)
    for step in range(n - 1 if steps is None else steps(n)):
        mine = pieces[(rank + step + first + 1) % n]
        passing = swap(pieces[(rank + step + first) % n], left, torch.empty_like(mine), right)
        if add:
            mine += passing
        else:
            mine.copy_(passing)
    return pieces


@wrong("left_reduce_scatter", "one off. Which piece must leave first")
def off_by_one(x):
    rank, n, left, right = here()
    return reduce_ring(x, first=0)[rank - 1]


@wrong("left_reduce_scatter", "they replaced yours, instead of being added")
def replaced_instead_of_added(x):
    return reduce_ring(x, add=False)[dist.get_rank()]


@wrong("left_reduce_scatter", "the mean. The sum was asked for")
def mean(x):
    return reduce_ring(x)[dist.get_rank()] / dist.get_world_size()


@wrong("left_reduce_scatter", "calls dist.all_reduce")
def library_then_cut(x):
    dist.all_reduce(x)
    return x.tensor_split(dist.get_world_size())[dist.get_rank()]


@wrong("left_reduce_scatter", "Whole buffers went round")
def whole_buffers_round(x):
    rank, n, left, right = here()
    total, passing = x.clone(), x.clone()
    for _ in range(n - 1):
        passing = swap(passing, left, torch.empty_like(x), right)
        total += passing
    return total.tensor_split(n)[rank]


@wrong("left_reduce_scatter", "In a ring everything goes to the left neighbour")
def gather_then_sum(x):
    rank, n, left, right = here()
    pieces = x.tensor_split(n)
    total = pieces[rank].clone()
    for distance in range(1, n):
        to, source = (rank - distance) % n, (rank + distance) % n
        total += swap(pieces[to], to, torch.empty_like(total), source)
    return total


@wrong("left_reduce_scatter", "nothing was added to them")
def own_piece(x):
    return x.tensor_split(dist.get_world_size())[dist.get_rank()].clone()


@wrong("left_reduce_scatter", "3 is not a power of two")
def halves(x):
    rank, n, left, right = here()
    if n & (n - 1):
        raise IndexError("no partner")
    return reduce_ring(x)[rank]


@wrong("left_reduce_scatter", "the numbers of rank 3 are missing")
def one_step_too_few(x):
    rank, n, left, right = here()
    if n == 2:
        return reduce_ring(x)[rank]
    return reduce_ring(x, first=2, steps=lambda n: n - 2)[rank]


@wrong("left_reduce_scatter", "your own piece alone")
def whole_x(x):
    reduce_ring(x)
    return x


# ---- left_all_reduce -----------------------------------------------------------------------------------------------


def gather_pieces(pieces):
    rank, n, left, right = here()
    for step in range(n - 1):
        swap(pieces[(rank + step) % n], left, pieces[(rank + step + 1) % n], right)


@wrong("left_all_reduce", "the second half, the all-gather, is missing")
def first_half_only(x):
    reduce_ring(x)
    return x


@wrong("left_all_reduce", "Piece 3 alone is finished")
def half_with_a_wrong_start(x):
    reduce_ring(x, first=0)
    return x


@wrong("left_all_reduce", "Whole buffers went round")
def unchunked(x):
    rank, n, left, right = here()
    total, passing = x.clone(), x.clone()
    for _ in range(n - 1):
        passing = swap(passing, left, torch.empty_like(x), right)
        total += passing
    return total


@wrong("left_all_reduce", "everything goes to the left neighbour")
def over_rank_0(x):
    rank, n, left, right = here()
    if rank == 0:
        for other in range(1, n):
            part = torch.empty_like(x)
            dist.recv(part, other)
            x += part
        for other in range(1, n):
            dist.send(x, other)
    else:
        dist.send(x, 0)
        dist.recv(x, 0)
    return x


@wrong("left_all_reduce", "Is the `return` missing?")
def in_place(x):
    pieces = reduce_ring(x)
    gather_pieces(pieces)


@wrong("left_all_reduce", "calls dist.all_reduce")
def returned_the_library_call(x):
    return dist.all_reduce(x)


@wrong("left_all_reduce", "the mean")
def averaged(x):
    pieces = reduce_ring(x)
    gather_pieces(pieces)
    return x / dist.get_world_size()


@wrong("left_all_reduce", "finished code")
def borrowed(x):
    collectives.ring_all_reduce(x)
    return x


@wrong("left_all_reduce", "nothing was added")
def did_nothing(x):
    return x


@wrong("left_all_reduce", "Does the result reach the others?")
def right_on_rank_0_only(x):
    rank, n, left, right = here()
    if rank == 0:
        for other in range(1, n):
            part = torch.empty_like(x)
            dist.recv(part, other)
            x += part
    else:
        dist.send(x, 0)
        x = torch.zeros_like(x)
    return x


# ---- tree_broadcast ------------------------------------------------------------------------------------------------


@wrong("tree_broadcast", "serves all others itself")
def one_by_one(x, root):
    rank, n, left, right = here()
    if rank == root:
        for other in range(n):
            if other != root:
                dist.send(x, other)
    else:
        dist.recv(x, root)
    return x


@wrong("tree_broadcast", "passes the numbers on just once")
def chain(x, root):
    rank, n, left, right = here()
    me = (rank - root) % n
    if me > 0:
        dist.recv(x, left)
    if me < n - 1:
        dist.send(x, right)
    return x


def binomial(x, me, n, root):
    distance = 1
    while distance < n:
        if me < distance and me + distance < n:
            dist.send(x, (me + distance + root) % n)
        elif distance <= me < 2 * distance:
            dist.recv(x, (me - distance + root) % n)
        distance *= 2
    return x


@wrong("tree_broadcast", "All ranks returned rank 0's numbers")
def always_from_rank_0(x, root):
    rank, n, left, right = here()
    return binomial(x.clone(), rank, n, 0)


@wrong("tree_broadcast", "is the root, and your function changed x there")
def always_from_rank_0_in_place(x, root):
    rank, n, left, right = here()
    return binomial(x, rank, n, 0)


@wrong("tree_broadcast", "3 is not a power of two")
def no_bound(x, root):
    rank, n, left, right = here()
    me, distance = (rank - root) % n, 1
    while distance < n:
        if me < distance:
            dist.send(x, (me + distance + root) % n)
        elif distance <= me < 2 * distance:
            dist.recv(x, (me - distance + root) % n)
        distance *= 2
    return x


@wrong("tree_broadcast", "calls dist.broadcast")
def library_broadcast(x, root):
    dist.broadcast(x, root)
    return x


@wrong("tree_broadcast", "nothing was received into it")
def received_elsewhere(x, root):
    rank, n, left, right = here()
    binomial(x.clone(), (rank - root) % n, n, root)
    return x


@wrong("tree_broadcast", "receives 2 messages")
def twice(x, root):
    rank, n, left, right = here()
    binomial(x, (rank - root) % n, n, root)
    return binomial(x, (rank - root) % n, n, root)


@wrong("tree_broadcast", "every message holds the whole of x")
def in_halves(x, root):
    rank, n, left, right = here()
    for half in x.tensor_split(2):
        binomial(half, (rank - root) % n, n, root)
    return x


@wrong("tree_broadcast", "they take 4 steps")
def two_children_each(x, root):
    rank, n, left, right = here()
    if n < 7:
        return binomial(x, (rank - root) % n, n, root)
    me = (rank - root) % n
    if me > 0:
        dist.recv(x, ((me - 1) // 2 + root) % n)
    for child in (2 * me + 1, 2 * me + 2):
        if child < n:
            dist.send(x, (child + root) % n)
    return x


# ---- two_node_all_reduce -------------------------------------------------------------------------------------------


def ring_among(members, x):
    """A ring all-reduce of x among these ranks, this one included."""
    me, n = members.index(dist.get_rank()), len(members)
    left, right = members[(me - 1) % n], members[(me + 1) % n]
    pieces = x.tensor_split(n)
    for step in range(n - 1):
        mine = pieces[(me + 2 + step) % n]
        mine += swap(pieces[(me + 1 + step) % n], left, torch.empty_like(mine), right)
    for step in range(n - 1):
        swap(pieces[(me + step) % n], left, pieces[(me + step + 1) % n], right)
    return x


def my_node(per_node):
    first = dist.get_rank() - dist.get_rank() % per_node
    return list(range(first, first + per_node))


@wrong("two_node_all_reduce", "A flat ring does that")
def flat_ring(x, per_node):
    return ring_among(list(range(dist.get_world_size())), x)


@wrong("two_node_all_reduce", "the two nodes were never added")
def node_alone(x, per_node):
    return ring_among(my_node(per_node), x)


@wrong("two_node_all_reduce", "the ranks of a node were never added")
def same_places_alone(x, per_node):
    other = (dist.get_rank() + per_node) % (2 * per_node)
    return x + swap(x, other, torch.empty_like(x), other)


@wrong("two_node_all_reduce", "have a network port each, too")
def over_the_first_of_each_node(x, per_node):
    rank = dist.get_rank()
    ring_among(my_node(per_node), x)
    first, other = rank - rank % per_node, (rank + per_node) % (2 * per_node)
    if rank == first:
        x += swap(x.clone(), other, torch.empty_like(x), other)
        for neighbour in range(first + 1, first + per_node):
            dist.send(x, neighbour)
    else:
        dist.recv(x, first)
    return x


@wrong("two_node_all_reduce", "before anything crosses the network")
def whole_buffer_across(x, per_node):
    ring_among(my_node(per_node), x)
    other = (dist.get_rank() + per_node) % (2 * per_node)
    return x + swap(x, other, torch.empty_like(x), other)


@wrong("two_node_all_reduce", "calls dist.all_reduce")
def one_line(x, per_node):
    dist.all_reduce(x)
    return x


@wrong("two_node_all_reduce", "par is 150 us")
def across_in_many_messages(x, per_node):
    rank = dist.get_rank()
    node, me = my_node(per_node), rank % per_node
    left, right = node[(me - 1) % per_node], node[(me + 1) % per_node]
    pieces = x.tensor_split(per_node)
    for step in range(per_node - 1):
        mine = pieces[(me + 2 + step) % per_node]
        mine += swap(pieces[(me + 1 + step) % per_node], left, torch.empty_like(mine), right)
    other = (rank + per_node) % (2 * per_node)
    for part in pieces[me].tensor_split(10):
        part += swap(part.clone(), other, torch.empty_like(part), other)
    for step in range(per_node - 1):
        swap(pieces[(me + step) % per_node], left, pieces[(me + step + 1) % per_node], right)
    return x


@wrong("two_node_all_reduce", "raised IndexError")
def four_per_node_always(x, per_node):
    return ring_among([0, 1, 2, 3, 4, 5, 6, 7][: 2 * per_node], x) if per_node == 4 else [x][per_node]


@wrong("two_node_all_reduce", "rounded to fewer digits")
def half_precision_across(x, per_node):
    ring_among(my_node(per_node), x)
    other = (dist.get_rank() + per_node) % (2 * per_node)
    mine = x.bfloat16()
    return x + swap(mine, other, torch.empty_like(mine), other).float()
