"""The closed forms of the algorithms: against formulas.py, against numbers worked out by hand, and where two of them cross."""

import numpy as np
import pytest

from lessons_lib import formulas as f
from lessons_lib.algorithms import ALGORITHMS, algorithm, algorithms_of, crossing, fastest

SIZES = (1, 2, 3, 4, 5, 8, 13, 64)
SAME = {
    ("all_reduce", "ring"): f.ring_all_reduce,
    ("all_reduce", "two trees in small parts"): f.tree_all_reduce,
    ("reduce_scatter", "ring"): f.reduce_scatter,
    ("all_gather", "ring"): f.all_gather,
    ("broadcast", "chain in small parts"): f.broadcast,
    ("broadcast", "two trees in small parts"): f.tree_broadcast,
    ("scatter", "naive"): f.scatter,
    ("gather", "naive"): f.gather,
    ("all_to_all", "pairwise"): f.all_to_all,
}


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("which", SAME)
def test_formulas_of_the_same_algorithm_agree(which, n):
    for nbytes in (0, 1, 12345.0, 1e9):
        assert algorithm(*which).time(nbytes, n, 3e9, 2e-6) == pytest.approx(SAME[which](nbytes, n, 3e9, 2e-6), rel=1e-12)


@pytest.mark.parametrize(
    "collective, name, n, steps, volume",
    [
        ("broadcast", "naive", 4, 3, 3),
        ("broadcast", "binomial tree", 5, 3, 3),
        ("broadcast", "scatter, then ring", 4, 5, 1.5),
        ("reduce", "binomial tree", 8, 3, 3),
        ("scatter", "binomial tree", 8, 3, 7 / 8),
        ("gather", "binomial tree", 6, 3, 5 / 6),
        ("reduce_scatter", "halving", 8, 3, 7 / 8),
        ("all_gather", "doubling", 4, 2, 3 / 4),
        ("all_reduce", "naive", 4, 6, 6),
        ("all_reduce", "ring", 4, 6, 1.5),
        ("all_reduce", "ring of whole buffers", 4, 3, 3),
        ("all_reduce", "binomial tree", 4, 4, 4),
        ("all_reduce", "doubling", 8, 3, 3),
        ("all_reduce", "doubling", 6, 4, 4),  # on 4 ranks, and two steps for the guests
        ("all_reduce", "halving and doubling", 8, 6, 1.75),
        ("all_reduce", "halving and doubling", 6, 6, 3.5),
        ("all_reduce", "two trees in small parts", 5, 6, 2),
    ],
)
def test_steps_and_volume_by_hand(collective, name, n, steps, volume):
    assert algorithm(collective, name).cost(n) == (steps, pytest.approx(volume, rel=1e-12))


@pytest.mark.parametrize("n", [2, 3, 4, 6, 8, 16, 100])
@pytest.mark.parametrize("collective", ["all_reduce", "broadcast"])
def test_both_take_equally_long_at_the_crossing_and_change_places_there(collective, n):
    named = algorithms_of(collective)
    found = 0
    for a in named.values():
        for b in named.values():
            size = crossing(a, b, n, 50e9, 4e-6)
            small, large = (np.sign(a.time(s, n, 50e9, 4e-6) - b.time(s, n, 50e9, 4e-6)) for s in (1e-9, 1e15))
            differ = abs(a.cost(n)[1] - b.cost(n)[1]) > 1e-12 and a.cost(n)[0] != b.cost(n)[0]
            if size is None:
                assert not differ or small == large
            else:
                assert a.time(size, n, 50e9, 4e-6) == pytest.approx(b.time(size, n, 50e9, 4e-6), rel=1e-9)
                assert small == -large
                found += 1
    assert found > 0 or n == 2


def test_ring_against_two_trees_by_hand():
    """8 ranks: 14 latencies against 6, 1.75 buffers against 2: equal at 8 / 0.25 = 32 times latency x bandwidth."""
    ring, trees = algorithm("all_reduce", "ring"), algorithm("all_reduce", "two trees in small parts")
    assert crossing(ring, trees, 8, 450e9, 1.9e-6) == pytest.approx(32 * 450e9 * 1.9e-6, rel=1e-12)


def test_no_crossing_where_one_always_wins():
    ring, naive = algorithm("all_reduce", "ring"), algorithm("all_reduce", "naive")
    assert crossing(ring, naive, 8, 1e9, 1e-6) is None
    assert crossing(ring, ring, 8, 1e9, 1e-6) is None
    assert crossing(ring, algorithm("all_reduce", "two trees in small parts"), 8, 1e9, 0.0) is None


def test_arrays():
    ring, sizes = algorithm("all_reduce", "ring"), np.logspace(0, 9, 10)
    assert ring.time(sizes, 4, 1e9, 1e-6) == pytest.approx(f.ring_all_reduce(sizes, 4, 1e9, 1e-6), rel=1e-12)


@pytest.mark.parametrize(
    "call, told",
    [
        (lambda: algorithms_of("all_reduc"), "'all_reduc' is not a collective that has algorithms here; choose one of broad"),
        (lambda: algorithm("all_reduce", "rings"), "There is no algorithm 'rings' for all_reduce; choose one of naive"),
        (lambda: algorithm("reduce_scatter", "halving").cost(6), "halving needs 2, 4, 8, 16, ... members, not 6"),
        (lambda: algorithm("all_reduce", "ring").cost(0), "The number of members is 0"),
        (lambda: algorithm("all_reduce", "ring").cost(True), "The number of members must be a whole number"),
        (lambda: algorithm("all_reduce", "ring").cost(None), "The number of members must be a whole number"),
        (lambda: algorithm("all_reduce", "ring").time(-1, 2, 1e9), "The number of bytes is -1"),
        (lambda: algorithm("all_reduce", "ring").time(1, 2, 0), "The bandwidth is 0"),
        (lambda: algorithm("all_reduce", "ring").time(1, 2, 1e9, float("nan")), "The latency is nan"),
        (lambda: algorithm("all_reduce", "ring").time(1, 2, float("inf")), "The bandwidth is inf"),
        (lambda: crossing("ring", "tree", 8, 1e9, 1e-6), "crossing compares two algorithms, such as .* not 'ring'"),
        (lambda: crossing(*list(algorithms_of("all_reduce").values())[:2], 8, [1e9], 1e-6), "one bandwidth and one latency"),
    ],
)  # fmt: skip
def test_wrong_input_is_named(call, told):
    with pytest.raises((ValueError, TypeError), match=told):
        call()


def test_every_algorithm_needs_at_least_what_any_must():
    """A broadcast needs ceil(log2 n) steps and the buffer once; an all-reduce at least 2(n-1)/n of it. [Thakur et al., 2005]"""
    for a in ALGORITHMS:
        for n in (2, 4, 8, 16):
            steps, volume = a.cost(n)
            least = {"broadcast": 1, "reduce": 1, "all_reduce": 2 * (n - 1) / n}.get(a.collective, (n - 1) / n)
            assert steps >= (n - 1).bit_length() and volume >= least - 1e-12, a.name


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "reduce", "all_gather"])
@pytest.mark.parametrize("n", [2, 4, 8, 64])
def test_the_fastest_by_size_is_the_fastest_of_all_at_every_size(collective, n):
    everything = tuple(algorithms_of(collective).values())
    stretches = fastest(everything, n, 25e9, 5e-6)
    assert stretches[0][0] == 0 and [b for b, _ in stretches] == sorted(b for b, _ in stretches)
    for size in np.logspace(0, 12, 97):
        winner = [a for begin, a in stretches if begin <= size][-1]
        assert winner.time(size, n, 25e9, 5e-6) <= min(a.time(size, n, 25e9, 5e-6) for a in everything) * (1 + 1e-12)


def test_the_fastest_by_size_by_hand():
    """8 ranks, latency x bandwidth = 1: doubling 3 + 3s, halving and doubling 6 + 1.75s, ring 14 + 1.75s: equal at s = 3 / 1.25."""
    chosen = [algorithm("all_reduce", name) for name in ("ring", "doubling", "halving and doubling")]
    assert [(begin, a.name) for begin, a in fastest(chosen, 8, 1.0, 1.0)] == [(0, "doubling"), (2.4, "halving and doubling")]
    assert [(begin, a.name) for begin, a in fastest(chosen, 8, 1.0, 0.0)] == [(0, "ring")]  # as fast as the third, and named first
    with pytest.raises(ValueError, match="at least one algorithm"):
        fastest([], 8, 1.0, 1.0)
