"""The algorithms of each collective as closed forms: how many latencies, and how many times the buffer. Predicted, torch-free.

Every algorithm here costs steps x latency + volume x bytes / bandwidth: `steps` messages follow each other on the path that ends
last, and carry `volume` times the full buffer between them. The model and the meaning of bytes are those of `formulas`; the
programs, where there is one, are in `parallel.collectives` under the name in `program`. Sizes are taken to divide: of an uneven
buffer, the largest chunk counts for each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .formulas import check_alpha_beta
from .hardware import whole

LARGEST_GROUP = 1_000_000
_MPICH = "Thakur, Rabenseifner, Gropp, 2005"
_RING = "Patarasuk and Yuan, 2009"
_COUNTED = "counted: n-1 steps, a whole buffer each"
_TWO_TREES = "Sanders, Speck, Traeff, 2009 (NCCL's double binary trees)"
_RABENSEIFNER = "Rabenseifner, 2004"


def rounds(n: int) -> int:
    """ceil(log2 n), exactly: how often a group of one must double to reach n."""
    return (n - 1).bit_length()


def share(n: int) -> float:
    """(n-1)/n: all chunks of the buffer but one's own."""
    return (n - 1) / n


@dataclass(frozen=True)
class Algorithm:
    """One way to do a collective. `steps(n)`: latencies in a row; `volume(n)`: times the full buffer; both for n > 1 ranks."""

    collective: str
    name: str
    steps: Callable[[int], int]
    volume: Callable[[int], float]
    source: str
    program: str = ""  # in parallel.collectives; "" where only the closed form is here
    powers_only: bool = False  # whether n must be a power of two

    def cost(self, members: int) -> tuple[int, float]:
        """(latencies in a row, times the full buffer). ValueError where this number of members is not possible."""
        n = whole(members, "The number of members", 1, LARGEST_GROUP)
        if self.powers_only and n & (n - 1):
            raise ValueError(f"{self.name} needs 2, 4, 8, 16, ... members, not {n}: use the ring, which takes any number.")
        return (self.steps(n), self.volume(n)) if n > 1 else (0, 0.0)

    def time(self, nbytes, members, bandwidth, latency=0.0):
        """Predicted seconds for a full buffer of `nbytes`; numbers or arrays as in `formulas`."""
        steps, volume = self.cost(members)
        nbytes, bandwidth, latency = check_alpha_beta(nbytes, bandwidth, latency)
        return steps * latency + volume * nbytes / bandwidth


def _powers(by_power: Callable[[int], float], guests: float) -> Callable[[int], float]:
    """For algorithms on p = 2^floor(log2 n) ranks: what p ranks need, and `guests` more where some ranks are left over."""
    return lambda n: by_power(1 << (n.bit_length() - 1)) + (guests if n & (n - 1) else 0)


def _table() -> tuple[Algorithm, ...]:
    def ring(n):
        return n - 1

    def one(n):
        return 1.0

    A = Algorithm
    return (
        A("broadcast", "naive", ring, ring, _MPICH, "naive_broadcast"),
        A("broadcast", "binomial tree", rounds, rounds, _MPICH, "binomial_broadcast"),
        A("broadcast", "scatter, then ring", lambda n: rounds(n) + n - 1, lambda n: 2 * share(n), _MPICH),
        A("broadcast", "chain in small parts", ring, one, "nccl-tests, PERFORMANCE.md", "chain_broadcast"),
        A("broadcast", "two trees in small parts", rounds, one, _TWO_TREES),
        A("reduce", "naive", ring, ring, _MPICH, "naive_reduce"),
        A("reduce", "binomial tree", rounds, rounds, _MPICH, "binomial_reduce"),
        A("scatter", "naive", ring, share, _MPICH, "naive_scatter"),
        A("scatter", "binomial tree", rounds, share, _MPICH, "binomial_scatter"),
        A("gather", "naive", ring, share, _MPICH, "naive_gather"),
        A("gather", "binomial tree", rounds, share, _MPICH, "binomial_gather"),
        A("reduce_scatter", "ring", ring, share, _RING, "ring_reduce_scatter"),
        A("reduce_scatter", "halving", rounds, share, _MPICH, "recursive_halving_reduce_scatter", True),
        A("all_gather", "ring", ring, share, _RING, "ring_all_gather"),
        A("all_gather", "doubling", rounds, share, _MPICH, "recursive_doubling_all_gather", True),
        A("all_to_all", "pairwise", ring, share, _MPICH, "all_to_all"),
        A("all_reduce", "naive", lambda n: 2 * (n - 1), lambda n: 2 * (n - 1), _MPICH, "naive_all_reduce"),
        A("all_reduce", "ring of whole buffers", ring, ring, _COUNTED, "whole_buffer_ring_all_reduce"),
        A("all_reduce", "binomial tree", lambda n: 2 * rounds(n), lambda n: 2 * rounds(n), _MPICH, "binomial_all_reduce"),
        A("all_reduce", "doubling", _powers(rounds, 2), _powers(rounds, 2), _RABENSEIFNER, "recursive_doubling_all_reduce"),
        A("all_reduce", "ring", lambda n: 2 * (n - 1), lambda n: 2 * share(n), _RING, "ring_all_reduce"),
        A("all_reduce", "halving and doubling", _powers(lambda p: 2 * rounds(p), 2), _powers(lambda p: 2 * share(p), 2),
          _RABENSEIFNER, "halving_doubling_all_reduce"),
        A("all_reduce", "two trees in small parts", lambda n: 2 * rounds(n), lambda n: 2.0, _TWO_TREES),
    )  # fmt: skip


ALGORITHMS = _table()


def algorithms_of(collective: str) -> dict[str, Algorithm]:
    """The algorithms of one collective by name. ValueError for a collective that has none."""
    found = {a.name: a for a in ALGORITHMS if a.collective == collective}
    if not found:
        known = ", ".join(dict.fromkeys(a.collective for a in ALGORITHMS))
        raise ValueError(f"{collective!r} is not a collective that has algorithms here; choose one of {known}.")
    return found


def algorithm(collective: str, name: str) -> Algorithm:
    """One algorithm. ValueError names those that there are."""
    found = algorithms_of(collective)
    if name not in found:
        raise ValueError(f"There is no algorithm {name!r} for {collective}; choose one of {', '.join(found)}.")
    return found[name]


def crossing(a: Algorithm, b: Algorithm, members, bandwidth, latency) -> float | None:
    """Bytes at which both take equally long: the one with fewer steps wins below, the one with less volume above.

    None where one of them is the faster for every size, or both always take the same time.
    """
    for one in (a, b):
        if not isinstance(one, Algorithm):
            raise TypeError(f"crossing compares two algorithms, such as algorithm('all_reduce', 'ring'), not {one!r}.")
    _, bandwidth, latency = check_alpha_beta(0, bandwidth, latency)
    if np.ndim(bandwidth) or np.ndim(latency):
        raise TypeError("crossing is for one link: give one bandwidth and one latency, not an array.")
    (steps, volume), (other_steps, other_volume) = a.cost(members), b.cost(members)
    more_steps, less_volume = steps - other_steps, other_volume - volume
    if more_steps * less_volume <= 0 or abs(less_volume) < 1e-12 or latency == 0:
        return None
    return float(more_steps / less_volume * latency * bandwidth)


def fastest(algorithms, members, bandwidth, latency) -> list[tuple[float, Algorithm]]:
    """Which is the fastest from how many bytes on: [(0, one), (bytes, another), ...]. Of equals the one that comes first."""
    if not algorithms or not all(isinstance(a, Algorithm) for a in algorithms):
        raise ValueError(f"Give at least one algorithm, such as algorithm('all_reduce', 'ring'), not {algorithms!r}.")
    check_alpha_beta(0, bandwidth, latency)
    now = min(algorithms, key=lambda a: (a.cost(members)[0] * latency, round(a.cost(members)[1], 12)))
    out = [(0.0, now)]
    while True:
        later = [
            (crossing(now, a, members, bandwidth, latency), a) for a in algorithms if a.cost(members)[1] < now.cost(members)[1]
        ]
        later = [(size, a) for size, a in later if size is not None]
        if not later:
            return out
        size, now = min(later, key=lambda pair: (pair[0], pair[1].cost(members)[1]))
        out.append((size, now))
