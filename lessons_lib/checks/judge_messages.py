"""What an answer made of a few messages must show (lesson 01): exchange, running_total, multiply_while_sending, relay."""

from __future__ import annotations

import numpy as np

from ..hardware import H100, PCIE4, Cluster, Device, Link
from ..replay import replay
from .structure import count, expect_by_hand, expect_sends, receives, sends, steps
from .trial import Case, Trial, draw, shown
from .values import combination, expect, explain_sum, tensor

# ---- exchange ---------------------------------------------------------------------------------------------------------


def judge_exchange(trial: Trial) -> str:
    for partners, shape, dtype in (
        ((1, 0), (5,), "float32"),
        ((2, 3, 0, 1), (3, 4), "int64"),  # partners of the same parity
        ((3, 4, None, 0, 1), (7,), "float64"),
    ):
        inputs = [None if other is None else (draw(*shape, dtype=dtype), other) for other in partners]
        case = trial.run(inputs)
        expect_by_hand(case)
        expected = [None if other is None else case.array(other) for other in partners]
        expect(case, expected, lambda rank, got, case=case: _explain_exchange(case, rank, got))
        nbytes = {rank: case.array(rank).nbytes for rank in case.active}
        expect_sends(case, [[] if other is None else [(other, nbytes[rank])] for rank, other in enumerate(partners)])
        trial.passed(case.ranks)
    taken = steps(case.recording)
    how = (
        "at the same time, for a link carries both directions at once"
        if taken == 1
        else "one after the other; isend lets both move at once"
    )
    return f"Each pair moved {count(2, 'message')} of {nbytes[0]} bytes in {count(taken, 'step')}: {how}."


def _explain_exchange(case: Case, rank: int, got) -> str:
    if np.array_equal(got, case.array(rank)):
        return "These are its own numbers: return the buffer that you received into."
    if not got.any():
        return "These are zeros: was the buffer returned before the message had arrived?"
    if not receives(case.recording, rank):
        return "This rank received nothing at all."
    return ""


# ---- running_total ----------------------------------------------------------------------------------------------------


def judge_running_total(trial: Trial) -> str:
    for ranks in (4, 2, 3, 5, 1):
        case = trial.run([(draw(12),) for _ in range(ranks)])
        expect_by_hand(case)
        arrays = [case.array(rank) for rank in range(ranks)]
        totals = list(np.cumsum(arrays, axis=0, dtype="float32"))
        expect(case, totals, lambda rank, got, arrays=arrays: _explain_total(rank, got, arrays))
        nbytes = arrays[0].nbytes
        expected = [[(rank + 1, nbytes)] if rank + 1 < ranks else [] for rank in range(ranks)]
        expect_sends(case, expected, lambda rank, case=case: _explain_chain(case, rank))
        trial.passed(ranks)
        if ranks == 5:
            taken = steps(case.recording)
    return (
        f"With 5 ranks {count(4, 'message')} of {nbytes} bytes went down the chain in {count(taken, 'step')}: n-1, for "
        "each waits for the one before."
    )


def _explain_total(rank: int, got, arrays) -> str:
    n = len(arrays)
    factors = combination(got, arrays)
    if factors is None:
        return ""
    if not factors[rank] and factors[:rank].all():
        return f"Rank {rank}'s own numbers are missing: the running total includes them."
    if factors.all() and rank < n - 1:
        return "This is the total of all ranks: rank r should only have the numbers of ranks 0 to r."
    if rank > 1 and np.count_nonzero(factors) == 2 and factors[rank - 1] and factors[rank]:
        return f"This is rank {rank - 1}'s and its own numbers only: pass on the total, not what you were given."
    return explain_sum(rank, got, arrays[: rank + 1]) if not factors[rank + 1 :].any() else ""


def _explain_chain(case: Case, rank: int) -> str:
    sent = sends(case.recording, rank)
    if len({peer for peer, _ in sent}) > 1:
        return "One message to the next rank is enough: what it passes on holds your numbers already."
    return ""


# ---- multiply_while_sending -------------------------------------------------------------------------------------------

_ROWS, _WIDTH = 32, 48
_PRODUCT = 1e-6  # seconds for one product on the device of this exercise; the message takes as long
_EQUAL = Cluster(
    Device(2 * _ROWS * _WIDTH**2 / _PRODUCT, 1e9, 1e18, efficiency=1.0, name="a device"),
    intra_node=Link(_ROWS * _WIDTH * 4 / _PRODUCT, 0.0, "a link as fast as it"),
)
PAR_PRODUCTS = 2.2


def judge_multiply_while_sending(trial: Trial) -> str:
    for partners in ((1, 0), (2, 3, 0, 1), (2, None, 0)):
        weight = draw(_WIDTH, _WIDTH)
        case = trial.run([None if other is None else (draw(_ROWS, _WIDTH), weight, other) for other in partners])
        expect_by_hand(case)
        _expect_products(case, partners)
        nbytes = _ROWS * _WIDTH * 4
        expect_sends(
            case,
            [[] if other is None else [(other, nbytes)] for other in partners],
            lambda rank, case=case: _explain_products(case, rank),
        )
        products = replay(case.recording, _EQUAL).step_time / _PRODUCT
        if products > PAR_PRODUCTS:
            late = "nothing is computed while the messages move" if products > 2.9 else "only part of the message is hidden"
            raise case.wrong(
                f"The values are right. Replayed where a product takes as long as a message, your step takes "
                f"{products:.1f} products; "
                f"par is {PAR_PRODUCTS}: {late}.",
                "Start both messages first; what do you have in hand that needs no message?",
            )
        trial.passed(case.ranks)
    return (
        f"Two products and a message as long as one took {products:.1f} products (replayed; par {PAR_PRODUCTS}): the "
        "message hides behind computation."
    )


def _expect_products(case: Case, partners) -> None:
    for rank in case.active:
        weight = case.array(rank, 1)
        expected = [case.array(owner) @ weight for owner in (rank, partners[rank])]
        value = case.value(rank)
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            raise case.wrong(f"Rank {rank}: your function returned {shown(value)}, and should return two tensors: mine, theirs.")
        got = [tensor(case, rank, part, want, f"as {name} ") for part, want, name in zip(value, expected, ("mine", "theirs"))]
        right = [np.array_equal(a, b) for a, b in zip(got, expected)]
        if all(right):
            continue
        which = ("mine", "theirs")[right.index(False)]
        if np.array_equal(got[0], expected[1]) and np.array_equal(got[1], expected[0]):
            why = "The two are swapped: your own product comes first."
        elif which == "theirs" and np.array_equal(got[1], expected[0]):
            why = "Both are the product of your own block."
        elif which == "theirs":
            why = "Was the partner's block multiplied before it had arrived? Wait for the receive first."
        else:
            why = ""
        raise case.wrong(
            f"Rank {rank}: {which} is not {'your own' if which == 'mine' else 'the partner' + chr(39) + 's'} block @ weight.", why
        )


def _explain_products(case: Case, rank: int) -> str:
    sent = sum(nbytes for _, nbytes in sends(case.recording, rank))
    return "Send the block once; its product is computed where it arrives." if sent == 2 * _ROWS * _WIDTH * 4 else ""


# ---- relay ------------------------------------------------------------------------------------------------------------

_RELAY_RANKS, _RELAY_LENGTH = 5, 2_000_003
_RELAY_CLUSTER = Cluster(H100, devices_per_node=_RELAY_RANKS, intra_node=PCIE4)
PAR_RELAY = 400e-6


def judge_relay(trial: Trial) -> str:
    for ranks, length in ((2, 1000), (4, 1001), (3, 2), (1, 5), (_RELAY_RANKS, _RELAY_LENGTH)):
        case = trial.run([(draw(length),) for _ in range(ranks)], may_change=(0,) if ranks > 1 else ())
        expect_by_hand(case)
        if 0 in case.returned[0].changed:
            raise case.wrong("Rank 0: your function changed x there, where everybody's numbers come from.")
        first = case.array(0)
        expect(case, [first] * ranks, lambda rank, got, first=first, case=case: _explain_relay(case, rank, got, first))
        for rank in range(ranks):
            sent = sends(case.recording, rank)
            strangers = sorted({peer for peer, _ in sent} - {rank + 1})
            total, needed = sum(nbytes for _, nbytes in sent), first.nbytes if rank + 1 < ranks else 0
            if strangers:
                raise case.wrong(
                    f"The values are right, but rank {rank} sends to rank {strangers[0]}: in the chain it sends to rank "
                    f"{rank + 1} only."
                )
            if total != needed:
                raise case.wrong(f"The values are right, but rank {rank} sends {total:,} bytes; {needed:,} are enough.")
        trial.passed(ranks)
    return _relay_par(case, first.nbytes)


def _explain_relay(case: Case, rank: int, got, first) -> str:
    right = got == first
    if right.any() and right[: right.sum()].all():
        return (
            f"The first {int(right.sum()):,} of {len(first):,} numbers are right, the rest never came: does a last, "
            "shorter piece get lost?"
        )
    if np.array_equal(got, case.array(rank)):
        return "These are the numbers that were in its buffer before: nothing arrived in it."
    return ""


def _relay_par(case: Case, nbytes: int) -> str:
    cut = len(sends(case.recording, 0))
    ideal = (cut + case.ranks - 2) * (PCIE4.latency + nbytes / cut / PCIE4.bandwidth)
    whole = (case.ranks - 1) * (PCIE4.latency + nbytes / PCIE4.bandwidth)
    taken = replay(case.recording, _RELAY_CLUSTER).step_time
    facts = (
        f"{nbytes / 1e6:.0f} MB down a chain of {case.ranks} H100s over PCIe 4, in {count(cut, 'piece')}: "
        f"{1e6 * taken:.0f} us (replayed)"
    )
    if taken > PAR_RELAY:
        if cut == 1:
            why = "Every rank waits until all of it has arrived before it passes anything on. Can a part go on earlier?"
        elif taken > 1.25 * ideal:
            why = (
                f"So many pieces could do it in {1e6 * ideal:.0f} us: does a rank take in the next piece while it still "
                "sends the last one?"
            )
        elif cut < 40:
            why = "The pieces flow well. With smaller ones the last rank starts sooner."
        else:
            why = "The pieces flow well, but every one of them pays the latency: larger ones pay it less often."
        raise case.wrong(f"The values are right. {facts}; par is {1e6 * PAR_RELAY:.0f} us.", why)
    return (
        f"{facts}; par {1e6 * PAR_RELAY:.0f} us, in one piece {1e6 * whole:.0f} us (predicted). Pieces keep all links busy at once."
    )
