"""The collectives of lesson 02: equal to torch.distributed's one line, and as many messages and bytes as their formulas say."""

import functools

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import collective_programs as programs  # noqa: E402
import torch.distributed as dist  # noqa: E402
from parts import part  # noqa: E402

from lessons_lib import formulas, replay, run  # noqa: E402
from lessons_lib.algorithms import ALGORITHMS, Algorithm, algorithm  # noqa: E402
from lessons_lib.errors import RankFailed  # noqa: E402
from lessons_lib.hardware import Cluster, Device, Link  # noqa: E402
from lessons_lib.parallel import collectives  # noqa: E402

NO_COMPUTE = Device(1e30, 1e30, 1e30, 1.0)  # so fast that only communication takes time
LATENCY_BOUND, BANDWIDTH_BOUND, BOTH = Link(1e15, 1e-3), Link(1e6, 1e-12), Link(2e8, 1e-5)
BY_HAND = [a for a in ALGORITHMS if a.program]
NAMES = [a.program for a in BY_HAND]
WORLDS = (2, 3, 4, 5, 6, 8)


# ---- values --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6])
def test_every_collective_equals_torchs_one_line(ranks):
    sizes = [1, 2, 7, 12, (3, 5), 61]  # fewer elements than ranks, uneven, even, two-dimensional
    assert [wrong for found in run(programs.each_equals_one_line, sizes, ranks=ranks).results for wrong in found] == []


def test_no_elements_at_all():
    assert [wrong for found in run(programs.each_equals_one_line, [0], ranks=3).results for wrong in found] == []


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_pieces_that_divide_equal_reduce_scatter_scatter_and_gather(ranks):
    results = run(programs.one_line_in_scatter_and_reduce_scatter, 6, ranks=ranks).results
    assert [wrong for found in results for wrong in found] == []


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 6])
def test_all_to_all_with_pieces_of_any_size(ranks):
    for case in (0, 1):
        assert run(programs.all_to_all_equals_one_line, case, ranks=ranks).results == [""] * ranks


def test_dtypes_and_reductions():
    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64,
              torch.uint8]  # fmt: skip
    op = dist.ReduceOp
    reductions = [op.SUM, op.PRODUCT, op.MIN, op.MAX, op.BAND, op.BOR, op.BXOR]
    assert [wrong for found in run(programs.dtypes_and_operations, dtypes, reductions, ranks=3).results for wrong in found] == []


def test_what_only_moves_may_be_of_any_dtype():
    dtypes = [torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16]
    assert [wrong for found in run(programs.any_dtype_moves, dtypes, ranks=3).results for wrong in found] == []


@pytest.mark.parametrize("size", [3, 10])
def test_subgroups(size):
    groups = [[1, 3, 5], [0, 2], [4, 5, 2, 1]]
    assert [wrong for found in run(programs.on_subgroups, groups, size, ranks=6).results for wrong in found] == []


@pytest.mark.parametrize("ranks, per_node", [(4, 2), (6, 3), (6, 2), (4, 1), (4, 4), (8, 2)])
def test_hierarchical_all_reduce(ranks, per_node):
    results = run(programs.across_nodes, per_node, [1, 5, 24, (3, 7)], ranks=ranks).results
    assert [wrong for found in results for wrong in found] == []


def test_gradients_do_not_get_in_the_way():
    def program():
        x = torch.full((5,), 1.0 + dist.get_rank(), requires_grad=True)
        collectives.ring_all_reduce(x)
        return x.requires_grad, x.tolist()

    assert run(program, ranks=3).results == [(True, [6.0] * 5)] * 3


# ---- messages and bytes of every rank ----------------------------------------------------------------------------------------


def expected(name, rank, n, nbytes):
    """(messages, bytes) that this rank sends, for a root of 0 and a buffer that divides. Counted by the definition."""
    chunk, p = nbytes // n, 1 << (n.bit_length() - 1)
    power, log_p = n == p, p.bit_length() - 1
    children = sum(rank < d and rank + d < n for d in (1 << k for k in range((n - 1).bit_length())))
    lowest = rank & -rank if rank else 1 << (n - 1).bit_length()  # a binomial tree's rank heads this many, if there are as many
    below = min(lowest, n - rank)
    rounds_down = [d for d in (1 << k for k in range((n - 1).bit_length())) if rank % (2 * d) == 0 and rank + d < n]
    guests = 2 if rank + p < n else 0
    table = {
        "naive_broadcast": (n - 1, (n - 1) * nbytes) if rank == 0 else (0, 0),
        "binomial_broadcast": (children, children * nbytes),
        "chain_broadcast": (8, nbytes) if rank < n - 1 else (0, 0),
        "naive_reduce": (1, nbytes) if rank else (0, 0),
        "binomial_reduce": (1, nbytes) if rank else (0, 0),
        "naive_scatter": (n - 1, (n - 1) * chunk) if rank == 0 else (0, 0),
        "binomial_scatter": (len(rounds_down), (below - 1) * chunk),
        "naive_gather": (1, chunk) if rank else (0, 0),
        "binomial_gather": (1, below * chunk) if rank else (0, 0),
        "ring_reduce_scatter": (n - 1, (n - 1) * chunk),
        "ring_all_gather": (n - 1, (n - 1) * chunk),
        "ring_all_reduce": (2 * (n - 1), 2 * (n - 1) * chunk),
        "whole_buffer_ring_all_reduce": (n - 1, (n - 1) * nbytes),
        "all_to_all": (n - 1, (n - 1) * chunk),
        "naive_all_reduce": (n - 1, (n - 1) * nbytes) if rank == 0 else (1, nbytes),
        "binomial_all_reduce": ((rank > 0) + children, ((rank > 0) + children) * nbytes),
    }
    if power:
        table["recursive_halving_reduce_scatter"] = table["recursive_doubling_all_gather"] = (log_p, (n - 1) * chunk)
    if rank >= p:
        table["halving_doubling_all_reduce"] = table["recursive_doubling_all_reduce"] = (1, nbytes)
    else:
        hosted = guests // 2
        table["halving_doubling_all_reduce"] = (2 * log_p + hosted, 2 * (p - 1) * nbytes // p + hosted * nbytes)
        table["recursive_doubling_all_reduce"] = (log_p + hosted, (log_p + hosted) * nbytes)
    return table[name]


@pytest.fixture(scope="module")
def recorded():
    """recorded(n): every algorithm that this many ranks allow, once, on a buffer that 1 to 8 divide into 8 parts each."""
    kept = {}

    def recorded(n):
        if n not in kept:
            names = [a.program for a in BY_HAND if not (a.powers_only and n & (n - 1))]
            kept[n] = names, run(programs.labelled, names, ELEMENTS, ranks=n, shapes_only=True)
        return kept[n]

    return recorded


ELEMENTS = 840 * 64
NBYTES = 4 * ELEMENTS


@pytest.mark.parametrize("n", WORLDS)
def test_messages_and_bytes_of_each_rank(recorded, n):
    names, recording = recorded(n)
    for name in names:
        sent = part(recording, name)
        for rank in range(n):
            found = (int(sent.sent_messages[rank].sum()), int(sent.sent_bytes[rank].sum()))
            assert found == expected(name, rank, n, NBYTES), (name, rank, n)


def test_one_rank_sends_nothing_and_takes_no_time(recorded):
    names, recording = recorded(1)
    assert len(names) == len(BY_HAND) and recording.sent_messages.sum() == 0
    assert all(a.time(NBYTES, 1, 1.0, 1.0) == 0 for a in BY_HAND)


def test_real_runs_send_what_runs_without_data_say():
    names = [a.program for a in BY_HAND if not a.powers_only and a.program != "all_to_all"]  # its pieces are equal here
    real = run(programs.labelled, names, 7, ranks=3)
    shapes = run(programs.labelled, names, 7, ranks=3, shapes_only=True)
    for name in names:
        assert (part(real, name).sent_bytes == part(shapes, name).sent_bytes).all(), name
        assert (part(real, name).sent_messages == part(shapes, name).sent_messages).all(), name


@pytest.mark.parametrize("n, elements", [(3, 7), (4, 10), (5, 3), (6, 20)])
def test_bytes_where_the_size_does_not_divide(n, elements):
    names = ["ring_reduce_scatter", "ring_all_gather", "ring_all_reduce"]
    recording = run(programs.labelled, names, elements, ranks=n, shapes_only=True)
    chunk = [4 * (elements // n + (r < elements % n)) for r in range(n)]
    for rank in range(n):
        reduced, gathered = (4 * elements - chunk[r % n] for r in (rank, rank + 1))  # all but one's own, all but the right one's
        sent = [int(part(recording, name).sent_bytes[rank].sum()) for name in names]
        assert sent == [reduced, gathered, reduced + gathered]
        assert sent[2] <= formulas.bytes_sent("all_reduce", n * max(chunk), n)


# ---- time ----------------------------------------------------------------------------------------------------------------------


@functools.cache
def without_data(names, elements, ranks_per_node, ranks):
    return run(programs.labelled, names, elements, ranks_per_node, ranks=ranks, shapes_only=True)


def seconds(recording, link):
    return replay(recording, Cluster(NO_COMPUTE, devices_per_node=recording.world_size, intra_node=link)).step_time


@pytest.mark.parametrize("link", [LATENCY_BOUND, BANDWIDTH_BOUND, BOTH], ids=["latency-bound", "bandwidth-bound", "both"])
@pytest.mark.parametrize("n", WORLDS)
def test_replayed_time_is_the_closed_form(recorded, n, link):
    names, recording = recorded(n)
    for a in BY_HAND:
        if a.program in names and a.program != "chain_broadcast":
            predicted = a.time(NBYTES, n, link.bandwidth, link.latency)
            assert seconds(part(recording, a.program), link) == pytest.approx(predicted, rel=1e-9), a.program
    eighth = NBYTES / 8  # the chain in 8 parts; the closed form in the table is its limit for ever smaller ones
    chain = (n - 2 + 8) * (link.latency + eighth / link.bandwidth)
    assert seconds(part(recording, "chain_broadcast"), link) == pytest.approx(chain, rel=1e-9)


@pytest.mark.parametrize("n, elements", [(2, 5), (3, 7), (4, 10), (5, 3), (5, 24), (6, 20)])
@pytest.mark.parametrize("link", [LATENCY_BOUND, BANDWIDTH_BOUND, BOTH], ids=["latency-bound", "bandwidth-bound", "both"])
def test_an_uneven_ring_takes_as_long_as_if_every_chunk_were_the_largest(n, elements, link):
    recording = without_data(("ring_all_reduce",), elements, None, n)
    padded = 4 * n * -(-elements // n)
    predicted = formulas.ring_all_reduce(padded, n, link.bandwidth, link.latency)
    assert seconds(recording, link) == pytest.approx(predicted, rel=1e-9)


SLOW = Link(1e7, 1e-4)


@pytest.mark.parametrize("nodes, per_node", [(2, 2), (2, 3), (3, 2), (2, 4), (4, 2)])
@pytest.mark.parametrize("inside, across", [(BOTH, SLOW), (LATENCY_BOUND, LATENCY_BOUND), (BANDWIDTH_BOUND, BANDWIDTH_BOUND)])
def test_time_and_bytes_across_nodes(nodes, per_node, inside, across):
    n = nodes * per_node
    names = ("hierarchical_all_reduce", "ring_all_reduce")
    recording = without_data(names, ELEMENTS, per_node, n)
    cluster = Cluster(NO_COMPUTE, nodes, per_node, inside, across)
    by_levels, flat = part(recording, names[0]), part(recording, names[1])
    links = (inside.bandwidth, across.bandwidth, inside.latency, across.latency)
    predicted = formulas.hierarchical_all_reduce(NBYTES, per_node, nodes, *links)
    assert replay(by_levels, cluster).step_time == pytest.approx(predicted, rel=1e-9)
    assert predicted == pytest.approx(formulas.collective_time("all_reduce", NBYTES, n, cluster), rel=1e-12)
    if across == SLOW:  # every step of a flat ring waits for the slow link
        slow = formulas.ring_all_reduce(NBYTES, n, across.bandwidth, across.latency)
        assert replay(flat, cluster).step_time == pytest.approx(slow, rel=1e-9)

    node = np.arange(n) // per_node
    leaves = node[:, None] != node[None, :]
    assert (by_levels.sent_bytes * leaves).sum(1).tolist() == [2 * (nodes - 1) * NBYTES // nodes // per_node] * n
    assert (by_levels.sent_bytes * ~leaves).sum(1).tolist() == [2 * (per_node - 1) * NBYTES // per_node] * n


# ---- input that cannot work --------------------------------------------------------------------------------------------------


def failure(program, ranks=3):
    with pytest.raises(RankFailed) as caught:
        run(program, ranks=ranks)
    return str(caught.value)


@pytest.mark.parametrize(
    "call, told",
    [
        (lambda c: c.ring_all_reduce([1.0]), "must be a tensor, not [1.0] (a list)"),
        (lambda c: c.ring_all_reduce(torch.zeros(4, 4).t()), "shape (4, 4) and stride (1, 4) is not contiguous"),
        (lambda c: c.naive_broadcast(torch.zeros(4, 4)[:, 0]), "stride (4,) is not contiguous"),
        (lambda c: c.binomial_broadcast(torch.zeros(4), 3), "root is 3, but the group has 3 ranks: give one from 0 to 2"),
        (lambda c: c.naive_scatter(torch.zeros(4), -1), "root is -1"),
        (lambda c: c.binomial_reduce(torch.zeros(4), True), "root is True, but must be a rank within the group"),
        (lambda c: c.naive_gather(torch.zeros(4), 1.0), "root is 1.0"),
        (lambda c: c.ring_all_reduce(torch.zeros(4), dist.ReduceOp.AVG), "For a mean, divide the sum"),
        (lambda c: c.ring_all_reduce(torch.zeros(4), "sum"), "op is 'sum', but must be a dist.ReduceOp, one of SUM, PRODUCT"),
        (lambda c: c.ring_all_reduce(torch.zeros(4), []), "op is []"),
        (lambda c: c.recursive_halving_reduce_scatter(torch.zeros(4)), "has 3 ranks, but halving and doubling need 2, 4, 8"),
        (lambda c: c.recursive_doubling_all_gather(torch.zeros(4)), "has 3 ranks"),
        (lambda c: c.chain_broadcast(torch.zeros(4), parts=0), "cut into 0 parts, but that must be a whole number of 1 or more"),
        (lambda c: c.chain_broadcast(torch.zeros(4), parts=2.5), "cut into 2.5 parts"),
        (lambda c: c.node_groups(2), "ranks_per_node is 2, but must be a whole number from 1 to 3 that divides the 3 ranks"),
        (lambda c: c.node_groups(0), "ranks_per_node is 0"),
        (lambda c: c.node_groups("2"), "ranks_per_node is '2'"),
        (lambda c: c.all_to_all([torch.zeros(1)] * 2, [torch.zeros(1)] * 3), "outputs must be a list of 3 tensors"),
        (lambda c: c.all_to_all([torch.zeros(1)] * 3, None), "inputs must be a list of 3 tensors, one for each rank"),
    ],
)  # fmt: skip
def test_wrong_input_is_named(call, told):
    def program():
        call(collectives)

    assert told in failure(program)


def test_a_rank_that_is_no_member_is_told():
    def program():
        group = dist.new_group([0, 1])
        if dist.get_rank() == 2:
            collectives.ring_all_reduce(torch.zeros(3), group=group)

    assert "Rank 2 is not a member of this group" in failure(program)


# ---- the table of algorithms ------------------------------------------------------------------------------------------------


def test_the_table_names_every_program_and_nothing_else():
    assert len(set(NAMES)) == len(NAMES)
    assert set(NAMES) == set(collectives.__all__) - {"node_groups", "hierarchical_all_reduce"}
    assert all(isinstance(a, Algorithm) for a in ALGORITHMS)
    assert algorithm("all_reduce", "ring").program == "ring_all_reduce"
