"""Closed forms of the three ways to split a training step: bytes sent, memory held, share spent idle. One function each.

Everything here is predicted, not measured. A count (ranks, stages, microbatches, tokens) is a whole number of 1 or more; bytes and
rates are numbers or numpy arrays. Bytes sent are those of one rank in one step. What activations take is in activations.py, the
slots of a schedule in parallel/schedules.py.
"""

from __future__ import annotations

from numbers import Real

from .formulas import LARGEST_GROUP, numbers
from .hardware import whole

_SENT = "a finite number of bytes, 0 or more"
_RATE = "a positive, finite number"


# ---- data parallel -----------------------------------------------------------------------------------------------------------


def data_parallel_bytes(gradient_bytes, ranks, zero=0):
    """2(N-1)/N x gradient bytes for plain data parallel, ZeRO-1 and ZeRO-2; 3(N-1)/N for ZeRO-3 (weights as wide as gradients).

    Source: ZeRO, arXiv:1910.02054, section 7.
    """
    n = _ranks(ranks)
    passes = 3 if _zero(zero) == 3 else 2
    return passes * (n - 1) / n * numbers(gradient_bytes, "gradient_bytes", _SENT, closed=True)


def hiding_ratio(ranks, tokens, flops, bandwidth, bytes_each=2):
    """Time of the all-reduce / time of backward: up to 1 it can hide. (N-1)/N x bytes_each x FLOP/s / (2 x tokens x bandwidth).

    `tokens` per rank and step, `flops` that a device reaches (FLOP/s), `bandwidth` in bytes/s per direction, `bytes_each` of a
    gradient. P parameters: 2(N-1)/N x P x bytes_each / bandwidth against 4 x P x tokens / FLOP/s, so P cancels. Latency, and the
    FLOPs of attention's scores, are left out. Source: arXiv:2006.15704 for the overlap; the ratio is arithmetic.
    """
    n, tokens = _ranks(ranks), whole(tokens, "tokens (per rank and step)", 1, 2**53)
    flops, bandwidth = numbers(flops, "flops", _RATE, closed=False), numbers(bandwidth, "bandwidth", _RATE, closed=False)
    return (n - 1) / n * numbers(bytes_each, "bytes_each", _RATE, closed=False) * flops / (2 * tokens * bandwidth)


def state_bytes_per_parameter(ranks, zero=0, gradient_bytes=2):
    """Bytes that a rank holds for each parameter, activations aside: 16; ZeRO-1 4 + 12/N; ZeRO-2 2 + 14/N; ZeRO-3 16/N.

    The recipe: bf16 weight (2) and gradient (2), fp32 master weight and Adam's two moments (12). With fp32 main gradients
    (gradient_bytes=4) it is 18 in all. Source: ZeRO, arXiv:1910.02054, section 5 and figure 1.
    """
    n, zero = _ranks(ranks), _zero(zero)
    if isinstance(gradient_bytes, bool) or not isinstance(gradient_bytes, Real) or gradient_bytes not in (2, 4):
        raise ValueError(f"gradient_bytes must be 2 (bf16) or 4 (fp32), not {gradient_bytes!r}.")
    weight, gradient, optimizer = 2, gradient_bytes, 12
    return (
        (weight / n if zero >= 3 else weight) + (gradient / n if zero >= 2 else gradient) + (optimizer / n if zero else optimizer)
    )


# ---- tensor parallel -----------------------------------------------------------------------------------------------------------


def tensor_parallel_bytes(batch, sequence, hidden, ranks, bytes_each=2, recompute=False):
    """8 b s h (t-1)/t elements a layer and microbatch, forward and backward: 4 all-reduces of b s h; 6 with full recomputation.

    It nears 8 b s h and never shrinks with t. Sequence parallel sends the same in twice as many calls.
    Sources: arXiv:1909.08053; arXiv:2205.05198, section 4.2.2.
    """
    t = _ranks(ranks)
    b, s, h = (whole(v, name, 1, 2**40) for v, name in ((batch, "batch"), (sequence, "sequence"), (hidden, "hidden")))
    if not isinstance(recompute, bool):
        raise TypeError(f"recompute must be True (full recomputation) or False, not {recompute!r}.")
    calls = 6 if recompute else 4
    return calls * 2 * (t - 1) / t * b * s * h * numbers(bytes_each, "bytes_each", _RATE, closed=False)


# ---- pipeline parallel ---------------------------------------------------------------------------------------------------------


def bubble_overhead(stages, microbatches, chunks=1):
    """Idle time over ideal time, (p-1)/(v m): GPipe and 1F1B with v = 1, interleaved 1F1B with v chunks a rank.

    Source: Narayanan et al., arXiv:2104.04473, sections 2.2.1 and 2.2.2.
    """
    p, m, v = _pipeline(stages, microbatches, chunks)
    return (p - 1) / (v * m)


def bubble_share(stages, microbatches, chunks=1):
    """Share of the step spent idle, (p-1)/(v m + p-1): the same bubble over the whole time. Source: arXiv:2104.04473."""
    p, m, v = _pipeline(stages, microbatches, chunks)
    return (p - 1) / (v * m + p - 1)


def most_in_flight(stages, microbatches, rank=0):
    """Microbatches whose activations rank `rank` holds at most under 1F1B: min(m, p - rank). GPipe holds all m on every rank.

    Source: arXiv:2104.04473, section 2.2.1.
    """
    p, m, _ = _pipeline(stages, microbatches, 1)
    return min(m, p - whole(rank, "rank", 0, p - 1))


def boundary_bytes(batch, sequence, hidden, bytes_each=2):
    """b s h elements: what one stage sends to the next for a microbatch, forward; and as much back. Source: arXiv:2104.04473."""
    b, s, h = (whole(v, name, 1, 2**40) for v, name in ((batch, "batch"), (sequence, "sequence"), (hidden, "hidden")))
    return b * s * h * numbers(bytes_each, "bytes_each", _RATE, closed=False)


# ---- checks ----------------------------------------------------------------------------------------------------------------------


def _ranks(ranks) -> int:
    return whole(ranks, "ranks", 1, LARGEST_GROUP)


def _pipeline(stages, microbatches, chunks) -> tuple[int, int, int]:
    given = ((stages, "stages"), (microbatches, "microbatches"), (chunks, "chunks (of layers a rank)"))
    return tuple(whole(value, name, 1, LARGEST_GROUP) for value, name in given)


def _zero(zero) -> int:
    return whole(zero, "zero (the stage of ZeRO, 0 for plain data parallel)", 0, 3)
