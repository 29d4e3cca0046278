"""What a ring must show (lesson 02): pass_left, left_all_gather, left_reduce_scatter, left_all_reduce.

The lesson's rings run to the right; those of the exercises run to the left, so that the indices must be worked out anew.
"""

from __future__ import annotations

import numpy as np

from .structure import count, expect_by_hand, expect_sends, expect_steps, sends, traffic
from .trial import Case, Trial, draw
from .values import combination, expect, explain_sum, owner_of, pieces

_BOTH_AT_ONCE = "A rank can send to one side while it receives from the other: start the send with dist.isend, then receive."

# ---- pass_left --------------------------------------------------------------------------------------------------------


def judge_pass_left(trial: Trial) -> str:
    for ranks, shape in ((4, (2, 5)), (2, (6,)), (3, (7,)), (5, (9,))):
        case = trial.run([(draw(*shape),) for _ in range(ranks)])
        expect_by_hand(case)
        arrays = [case.array(rank) for rank in range(ranks)]
        expected = [arrays[(rank + 1) % ranks] for rank in range(ranks)]
        expect(case, expected, lambda rank, got, arrays=arrays: _explain_pass(rank, got, arrays))
        nbytes = arrays[0].nbytes
        expect_sends(case, [[((rank - 1) % ranks, nbytes)] for rank in range(ranks)])
        taken = expect_steps(case, 1, _BOTH_AT_ONCE)
        trial.passed(ranks)
    return (
        f"{count(ranks, 'message')} of {nbytes} bytes moved in {count(taken, 'step')}: in a ring every rank sends and "
        "receives at once."
    )


def _explain_pass(rank: int, got, arrays) -> str:
    owner = owner_of(got, arrays)
    if owner == rank:
        return "These are its own numbers."
    if owner is not None and owner == (rank - 1) % len(arrays):
        return f"These are rank {owner}'s, its left neighbour's: your ring runs to the right."
    return f"These are rank {owner}'s." if owner is not None else ""


# ---- left_all_gather --------------------------------------------------------------------------------------------------

_GATHER = ((4, 43), (2, 20), (3, 31), (5, 48), (4, 3), (1, 6))  # ranks, length: also fewer numbers than ranks


def judge_left_all_gather(trial: Trial) -> str:
    line = ""
    for ranks, length in _GATHER:
        sizes = [len(piece) for piece in pieces(np.zeros(length), ranks)]
        case = trial.run([(draw(size), length) for size in sizes])
        expect_by_hand(case)
        own = [case.array(rank) for rank in range(ranks)]
        expect(case, [np.concatenate(own)] * ranks, lambda rank, got, own=own: _explain_gather(rank, got, own))
        _expect_ring(case, sizes, skipped=lambda rank, ranks=ranks: (rank - 1) % ranks)
        taken = expect_steps(case, ranks - 1, _BOTH_AT_ONCE)
        trial.passed(ranks)
        if ranks == 5:
            line = _ring_line(case, taken, 4 * length, "about (n-1)/n of the result")
    return line


def _explain_gather(rank: int, got, own) -> str:
    blocks = np.split(got, np.cumsum([len(piece) for piece in own])[:-1])
    wrong = [n for n, (block, piece) in enumerate(zip(blocks, own)) if not np.array_equal(block, piece)]
    owners = [next((q for q, piece in enumerate(own) if _alike(piece, block)), None) for block in blocks]
    if wrong == [n for n in range(len(own)) if n != rank and len(own[n])]:
        return f"Only its own piece is there{'' if len(wrong) == 1 else '; none of the others arrived'}."
    owner = owners[wrong[0]]
    if owner is not None:
        return (
            f"In place {wrong[0]} are rank {owner}'s numbers: which piece does a rank pass on, and where does it put "
            "what it receives?"
        )
    return f"Missing or wrong: piece {', '.join(map(str, wrong))}."


def _alike(piece, block) -> bool:
    """Whether these are the same numbers; lengths may differ by one."""
    common = min(len(piece), len(block))
    return common > 0 and np.array_equal(piece[:common], block[:common])


# ---- left_reduce_scatter ----------------------------------------------------------------------------------------------

_REDUCE = ((4, 67), (2, 24), (3, 40), (5, 78), (4, 3), (1, 6))


def judge_left_reduce_scatter(trial: Trial) -> str:
    line = ""
    for ranks, length in _REDUCE:
        case = trial.run([(draw(length),) for _ in range(ranks)], may_change=(0,))
        expect_by_hand(case)
        cut = [pieces(case.array(rank), ranks) for rank in range(ranks)]
        expected = [np.sum([cut[q][rank] for q in range(ranks)], axis=0, dtype="float32") for rank in range(ranks)]
        expect(case, expected, lambda rank, got, cut=cut: _explain_piece(rank, got, cut), any_shape=True)
        sizes = [len(piece) for piece in cut[0]]
        _expect_ring(case, sizes, skipped=lambda rank: rank)
        taken = expect_steps(case, ranks - 1, _BOTH_AT_ONCE)
        trial.passed(ranks)
        if ranks == 5:
            line = _ring_line(case, taken, 4 * length, "about (n-1)/n of the buffer")
    return line


def _explain_piece(rank: int, got, cut) -> str:
    """Which piece, or which part of its sum, a rank returned instead of its own."""
    if len(got) == sum(map(len, cut[0])) > len(cut[0][rank]):
        return "That has the length of the whole buffer: return your own piece alone."
    for n in (rank, *(n for n in range(len(cut)) if n != rank)):
        sources = [own[n] for own in cut]
        if len(sources[0]) != len(got):
            continue
        if np.array_equal(got, np.sum(sources, axis=0)):
            return f"This is the finished piece {n}: one off. Which piece must leave first, so that piece {rank} ends here?"
        factors = combination(got, sources)
        if factors is not None and n != rank:
            return f"This is piece {n}, and not finished: {int(np.count_nonzero(factors))} of {len(cut)} ranks have added to it."
        if factors is not None:
            return explain_sum(rank, got, sources)
    return ""


# ---- left_all_reduce --------------------------------------------------------------------------------------------------


def judge_left_all_reduce(trial: Trial) -> str:
    line = ""
    for ranks, length in _REDUCE:
        case = trial.run([(draw(length),) for _ in range(ranks)], may_change=(0,))
        expect_by_hand(case)
        arrays = [case.array(rank) for rank in range(ranks)]
        total = np.sum(arrays, axis=0, dtype="float32")
        expect(case, [total] * ranks, lambda rank, got, arrays=arrays, total=total: _explain_total(rank, got, arrays, total))
        sizes = [len(piece) for piece in pieces(total, ranks)]
        _expect_ring(case, sizes, skipped=lambda rank: rank, also_skipped=lambda rank, ranks=ranks: (rank - 1) % ranks)
        taken = expect_steps(case, 2 * (ranks - 1), _BOTH_AT_ONCE)
        trial.passed(ranks)
        if ranks == 5:
            line = _ring_line(case, taken, 4 * length, "about 2(n-1)/n of the buffer")
    return line


def _explain_total(rank: int, got, arrays, total) -> str:
    whole = explain_sum(rank, got, arrays)
    if whole:
        return whole
    n = len(arrays)
    done = [i for i, (a, b) in enumerate(zip(pieces(got, n), pieces(total, n))) if np.array_equal(a, b)]
    if done == [rank]:
        return f"Piece {rank} is finished, the others are not: the second half, the all-gather, is missing."
    if len(done) == 1:
        return f"Piece {done[0]} alone is finished."
    return f"Finished pieces: {', '.join(map(str, done))} of 0 to {n - 1}." if done else ""


# ---- rings ------------------------------------------------------------------------------------------------------------


def _expect_ring(case: Case, sizes: list[int], skipped, also_skipped=None) -> None:
    """Every rank sent all pieces but skipped(rank) to its left neighbour, each once; then, if given, all but also_skipped(rank)."""
    ranks = case.ranks
    expected = []
    for rank in range(ranks):
        left = (rank - 1) % ranks
        halves = [skipped(rank)] + ([also_skipped(rank)] if also_skipped else [])
        expected.append([(left, 4 * size) for miss in halves for piece, size in enumerate(sizes) if piece != miss])
    expect_sends(case, expected, lambda rank: _explain_ring(case, rank, expected[rank], sum(sizes) * 4, len(expected[rank])))


def _explain_ring(case: Case, rank: int, expected, nbytes: int, messages: int) -> str:
    sent, ranks = sends(case.recording, rank), case.ranks
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    peers = {peer for peer, _ in sent}
    if ranks > 2 and peers == {right}:
        return f"Your ring runs to the right; this one should run to the left, from rank {rank} to rank {left}."
    if len(peers - {left}) and ranks > 2:
        return "In a ring everything goes to the left neighbour, and nothing to anybody else."
    if len(sent) > 1 and all(size == nbytes for _, size in sent):
        return "Whole buffers went round: cut them, and send one piece in each step."
    total = sum(size for _, size in sent)
    if total > sum(size for _, size in expected) and len(sent) == messages:
        return f"Your messages grow: {traffic(sent)}. A piece that the neighbour has had already need not go again."
    if len(sent) > messages:
        return f"{count(messages, 'step')} are enough: the last of yours brings what is there already."
    return ""


def _ring_line(case: Case, taken: int, nbytes: int, share: str) -> str:
    sent = sends(case.recording, 0)
    total = sum(size for _, size in sent)
    return (
        f"With {case.ranks} ranks and {nbytes} bytes, rank 0 sent {count(len(sent), 'message')}, {total} bytes, in "
        f"{count(taken, 'step')}: {share}."
    )
