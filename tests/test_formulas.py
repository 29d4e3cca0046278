"""Closed forms against numbers worked out by hand, against step-by-step counting, and against published tables."""

import csv
import math
from pathlib import Path

import numpy as np
import pytest

from lessons_lib import formulas as f
from lessons_lib.hardware import H100, Cluster, Link

MEASURED = list(csv.DictReader((Path(__file__).parent / "data" / "collectives.csv").open(encoding="utf-8")))
FAST, SLOW = Link(1000.0, 0.5), Link(10.0, 2.0)


@pytest.mark.parametrize(
    "call, seconds",
    [
        (lambda: f.ring_all_reduce(400, 4, 100, 0.5), 2 * 3 * (0.5 + 1.0)),  # 6 messages of 100 bytes, 1 s each, and 0.5 s
        (lambda: f.reduce_scatter(400, 4, 100, 0.5), 4.5),
        (lambda: f.all_gather(400, 4, 100, 0.5), 4.5),
        (lambda: f.all_to_all(400, 4, 100, 0.5), 4.5),
        (lambda: f.gather(400, 4, 100, 0.5), 4.5),
        (lambda: f.scatter(400, 4, 100, 0.5), 4.5),
        (lambda: f.broadcast(400, 4, 100, 0.5), 5.5),
        (lambda: f.reduce(400, 4, 100, 0.5), 5.5),
        (lambda: f.tree_broadcast(400, 5, 100, 0.5), 3 * 0.5 + 4),
        (lambda: f.tree_all_reduce(400, 8, 100, 0.5), 2 * 3 * 0.5 + 8),
        (lambda: f.barrier(5, 0.5), 1.5),
        (lambda: f.barrier(8, 0.5), 1.5),
        (lambda: f.barrier(9, 0.5), 2.0),
        (lambda: f.crossover(8, 450e9, 2e-6), 7.2e6),
    ],
)
def test_by_hand(call, seconds):
    assert call() == pytest.approx(seconds, rel=1e-12)


def test_one_member_takes_no_time():
    for formula in (f.ring_all_reduce, f.tree_all_reduce, f.reduce_scatter, f.all_gather, f.broadcast, f.tree_broadcast, f.reduce,
                    f.gather, f.scatter, f.all_to_all):  # fmt: skip
        assert formula(1e9, 1, 1.0, 1.0) == 0
    assert f.barrier(1, 1.0) == 0
    for op in f.COLLECTIVES:
        assert f.collective_time(op, 1e9, [3], Cluster(H100)) == 0
        assert f.bytes_sent(op, 1e9, 1) == 0


@pytest.mark.parametrize("n", range(2, 17))
def test_terms_of_the_ring_are_equal_at_the_crossover_and_trees_win_below(n):
    size = f.crossover(n, 1e9, 1e-6)
    latency_term, bandwidth_term = f.ring_all_reduce(0, n, 1e9, 1e-6), f.ring_all_reduce(size, n, 1e9, 0)
    assert latency_term == pytest.approx(bandwidth_term, rel=1e-12)
    if n >= 4:
        assert f.tree_all_reduce(0.9 * size, n, 1e9, 1e-6) < f.ring_all_reduce(0.9 * size, n, 1e9, 1e-6)
    assert f.tree_all_reduce(1e12, n, 1e9, 1e-6) > f.ring_all_reduce(1e12, n, 1e9, 1e-6)


@pytest.mark.parametrize("n", range(1, 40))
def test_rounds_of_a_barrier_reach_everybody(n):
    rounds, knows = 0, 1
    while knows < n:  # whoever knows of k ranks tells another: of 2k
        knows, rounds = 2 * knows, rounds + 1
    assert f.barrier(n, 1.0) == rounds


@pytest.mark.parametrize("n", range(2, 10))
def test_bytes_sent_are_counted_on_a_simulated_ring(n):
    piece = 840
    sent = sum(piece for step in range(2 * (n - 1)))  # one piece a step
    assert f.bytes_sent("all_reduce", piece * n, n) == pytest.approx(sent)
    for op in ("reduce_scatter", "all_gather", "all_to_all", "scatter"):
        assert f.bytes_sent(op, piece * n, n) == pytest.approx(sent / 2)
    assert f.bytes_sent("gather", piece * n, n) == piece
    assert f.bytes_sent("broadcast", piece * n, n) == f.bytes_sent("reduce", piece * n, n) == piece * n
    assert f.bytes_sent("barrier", 0, n) == 0


@pytest.mark.parametrize("row", MEASURED, ids=lambda r: f"{r['gpu']}-{r['n_gpus']}-{r['bytes']}")
def test_bus_bandwidth_of_published_measurements(row):
    size, n, seconds = float(row["bytes"]), int(row["n_gpus"]), float(row["time_us"]) * 1e-6
    assert f.busbw(row["collective"], size, n, seconds) / 1e9 == pytest.approx(float(row["busbw_GBps"]), rel=2e-3, abs=2e-3)


def test_bandwidth_definitions():
    assert f.algbw(1e9, 0.5) == 2e9
    assert f.busbw("all_reduce", 1e9, 4, 0.5) == 3e9
    assert f.busbw("all_gather", 1e9, 4, 0.5) == 1.5e9
    assert f.busbw("broadcast", 1e9, 4, 0.5) == f.busbw("reduce", 1e9, 4, 0.5) == 2e9
    seconds = f.ring_all_reduce(1e9, 8, 450e9)
    assert f.busbw("all_reduce", 1e9, 8, seconds) == pytest.approx(450e9)  # without latency a ring reaches the link's bandwidth


def test_links_of_a_group_decide():
    cluster = Cluster(H100, nodes=4, devices_per_node=4, intra_node=FAST, inter_node=SLOW)
    inside = f.collective_time("all_reduce", 1200, [4, 5, 6], cluster)
    assert inside == pytest.approx(f.ring_all_reduce(1200, 3, 1000, 0.5))
    assert f.collective_time("all_reduce", 1200, 3, cluster) == inside
    across = f.collective_time("all_reduce", 1200, [0, 4, 8], cluster)
    assert across == pytest.approx(f.ring_all_reduce(1200, 3, 10, 2.0))
    tree = f.collective_time("all_reduce", 1200, [0, 4, 8, 12], cluster, algorithm="tree")
    assert tree == pytest.approx(4 * 2.0 + 2 * 120)


def test_hierarchical_all_reduce_sends_a_share_of_the_buffer_over_the_network():
    cluster = Cluster(H100, nodes=4, devices_per_node=4, intra_node=FAST, inter_node=SLOW)
    # 8000 bytes over 4 x 4: inside, 3 pieces of 2000 twice; across, a ring of 4 over a quarter: 6 pieces of 500
    expected = 2 * 3 * (0.5 + 2.0) + 6 * (2.0 + 50.0)
    assert f.collective_time("all_reduce", 8000, 16, cluster) == pytest.approx(expected, rel=1e-12)
    assert f.hierarchical_all_reduce(8000, 4, 4, 1000, 10, 0.5, 2.0) == pytest.approx(expected, rel=1e-12)
    flat = f.ring_all_reduce(8000, 16, 10, 2.0)
    assert flat > 4 * expected  # the wrong model
    half = f.collective_time("reduce_scatter", 8000, 16, cluster)
    assert half == f.collective_time("all_gather", 8000, 16, cluster) == pytest.approx(expected / 2)


def test_other_hierarchical_collectives_by_hand():
    cluster = Cluster(H100, nodes=2, devices_per_node=2, intra_node=FAST, inter_node=SLOW)
    # all-to-all and gather, 400 bytes over 2 x 2: one piece of 100 inside, two across
    assert f.collective_time("all_to_all", 400, 4, cluster) == pytest.approx(0.6 + 2 * 12)
    assert f.collective_time("gather", 400, 4, cluster) == pytest.approx(0.6 + 2 * 12)
    # broadcast: half to the neighbour, half each across, halves exchanged
    assert f.collective_time("broadcast", 400, 4, cluster) == pytest.approx(0.7 + (2 + 20) + 0.7)
    assert f.collective_time("barrier", 0, 4, cluster) == pytest.approx(0.5 + 2.0)


def test_uneven_members_per_node_follow_the_stated_rule():
    cluster = Cluster(H100, nodes=2, devices_per_node=4, intra_node=FAST, inter_node=SLOW)
    # 3 members on node 0, 1 on node 1: inside as with 3, across the lone one carries everything
    expected = 2 * 2 * (0.5 + 0.4) + 2 * (2.0 + 60.0)
    assert f.collective_time("all_reduce", 1200, [0, 1, 2, 7], cluster) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("op", f.COLLECTIVES)
@pytest.mark.parametrize("algorithm", f.ALGORITHMS)
@pytest.mark.parametrize("shape", [(6, 1, 6, 6), (5, 5, 1, 1), (12, 3, 4, 4), (7, 2, 3, 4)])
def test_arrays_give_exactly_what_numbers_give(op, algorithm, shape):
    bandwidths = np.geomspace(1e6, 1e12, 37)
    together = f.price(op, 12345.0, shape, (bandwidths, 1e-6), (bandwidths / 7, 3e-6), algorithm)
    apart = [f.price(op, 12345.0, shape, (b, 1e-6), (b / 7, 3e-6), algorithm) for b in bandwidths.tolist()]
    assert np.broadcast_to(together, 37).tolist() == apart  # to the last bit: sweep relies upon it


def test_arrays_in_public_formulas():
    assert f.ring_all_reduce(400, 4, np.array([100, 200]), 0.5).tolist() == [9.0, 6.0]
    assert f.ring_all_reduce([400, 0], 4, 100, 0.5).tolist() == [9.0, 3.0]


BAD = [-1, math.nan, math.inf, True, None, "5", [], [1.0, math.nan], ["a"], [-1.0]]


@pytest.mark.parametrize("bad", BAD, ids=repr)
@pytest.mark.parametrize("place", [0, 2, 3])
def test_bad_numbers(place, bad):
    arguments = [400, 4, 100, 0.5]
    arguments[place] = bad
    with pytest.raises((ValueError, TypeError), match=("bytes", "", "bandwidth", "latency")[place]):
        f.ring_all_reduce(*arguments)


def test_zero_bandwidth_and_time():
    with pytest.raises(ValueError, match="bandwidth is 0.*positive"):
        f.broadcast(1, 2, 0)
    with pytest.raises(ValueError, match="time is 0.*positive"):
        f.algbw(1, 0)


@pytest.mark.parametrize("bad", [0, -3, 2.0, True, None, "4", 10**9])
def test_bad_members(bad):
    for call in (lambda: f.ring_all_reduce(1, bad, 1), lambda: f.bus_factor("all_reduce", bad), lambda: f.barrier(bad, 1)):
        with pytest.raises((ValueError, TypeError), match="number of members"):
            call()


def test_other_bad_arguments():
    cluster = Cluster(H100)
    for call, match in (
        (lambda: f.collective_time("allreduce", 1, 2, cluster), "'allreduce' is not a collective.*all_reduce"),
        (lambda: f.bus_factor("sum", 2), "'sum' is not a collective"),
        (lambda: f.collective_time("all_reduce", 1, 2, cluster, algorithm="star"), "'star'.*'ring' or 'tree'"),
        (lambda: f.collective_time("all_reduce", 1, 9, cluster), "from 1 to 8"),
        (lambda: f.collective_time("all_reduce", 1, [0, 0], cluster), "different ranks"),
        (lambda: f.collective_time("all_reduce", 1, [], cluster), "at least one"),
        (lambda: f.collective_time("all_reduce", 1, [0, 8], cluster), "rank is 8"),
        (lambda: f.collective_time("all_reduce", -1, 2, cluster), "bytes"),
        (lambda: f.hierarchical_all_reduce(1, 0, 2, 1, 1), "members per node is 0"),
        (lambda: f.hierarchical_all_reduce(1, 2, 2, 1, 0), "bandwidth across nodes is 0"),
    ):
        with pytest.raises(ValueError, match=match):
            call()
    with pytest.raises(TypeError, match="hardware.Cluster"):
        f.collective_time("all_reduce", 1, 2, H100)
