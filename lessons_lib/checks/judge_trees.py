"""What an answer with a logarithmic or a two-level shape must show (lesson 02): tree_broadcast, two_node_all_reduce."""

from __future__ import annotations

import numpy as np

from ..hardware import ETHERNET_100G, H100, NVLINK4, Cluster
from ..replay import replay
from .structure import count, expect_by_hand, expect_steps, network_bytes, receives, sends, steps
from .trial import Case, Trial, draw
from .values import combination, expect, explain_sum, owner_of

# ---- tree_broadcast ---------------------------------------------------------------------------------------------------


def judge_tree_broadcast(trial: Trial) -> str:
    for ranks, root in ((4, 0), (4, 2), (2, 1), (3, 1), (5, 4), (7, 3), (1, 0)):
        case = trial.run([(draw(15), root) for _ in range(ranks)], may_change=(0,))
        expect_by_hand(case)
        if 0 in case.returned[root].changed:
            raise case.wrong(f"Rank {root} is the root, and your function changed x there, where everybody's numbers come from.")
        x = case.array(root)
        expect(case, [x] * ranks, lambda rank, got, case=case, root=root: _explain_broadcast(case, rank, got, root))
        _expect_tree(case, root, x.nbytes)
        taken = expect_steps(case, (ranks - 1).bit_length(), _why_so_many_steps(case))
        trial.passed(ranks)
        if ranks == 7:
            line = (
                f"From rank {root} to all 7 in {count(taken, 'step')}, with {count(6, 'message')}: those who have it "
                "double in every step."
            )
    return line


def _explain_broadcast(case: Case, rank: int, got, root: int) -> str:
    arrays = [case.array(other) for other in range(case.ranks)]
    owner = owner_of(got, arrays)
    if root != 0 and all(np.array_equal(case.value(other), arrays[0]) for other in range(case.ranks)):
        return f"All ranks returned rank 0's numbers, but the root is rank {root}."
    if owner == rank:
        return "These are the numbers that were in its buffer before: nothing was received into it."
    return f"These are rank {owner}'s numbers, and the root is rank {root}." if owner is not None else ""


def _expect_tree(case: Case, root: int, nbytes: int) -> None:
    for rank in range(case.ranks):
        partial = [size for _, size in sends(case.recording, rank) if size != nbytes]
        if partial:
            raise case.wrong(
                f"Rank {rank} sends {partial[0]} bytes; in this tree every message holds the whole of x, {nbytes} bytes."
            )
    for rank in range(case.ranks):
        got, wanted = len(receives(case.recording, rank)), int(rank != root)
        if got != wanted:
            raise case.wrong(
                f"The values are right, but rank {rank} receives {count(got, 'message')}; "
                f"{'one is' if wanted else 'none is'} needed."
            )


def _why_so_many_steps(case: Case) -> str:
    senders = [len(sends(case.recording, rank)) for rank in range(case.ranks)]
    if max(senders) == sum(senders):
        return f"Rank {int(np.argmax(senders))} serves all others itself, one by one. Whoever has the numbers can help."
    if max(senders) == 1:
        return "Every rank passes the numbers on just once, and then does nothing. It could serve another one."
    return "How many ranks have the numbers after each step, at best? Does a rank serve first those that have most to pass on?"


# ---- two_node_all_reduce ----------------------------------------------------------------------------------------------

_PER_NODE, _LENGTH = 4, 1_000_003
_LARGEST = 1_000_000  # half precision would halve the bytes, and cannot hold these numbers
CLUSTER = Cluster(H100, nodes=2, devices_per_node=_PER_NODE, intra_node=NVLINK4, inter_node=ETHERNET_100G)
PAR_TIME = 150e-6


def judge_two_node_all_reduce(trial: Trial) -> str:
    for per_node, length in ((2, 62), (1, 9), (3, 101), (_PER_NODE, _LENGTH)):
        ranks = 2 * per_node
        case = trial.run([(draw(length, largest=_LARGEST), per_node) for _ in range(ranks)], may_change=(0,))
        expect_by_hand(case)
        arrays = [case.array(rank) for rank in range(ranks)]
        total = np.sum(arrays, axis=0, dtype="float32")
        expect(case, [total] * ranks, lambda rank, got, arrays=arrays, k=per_node: _explain_nodes(rank, got, arrays, k))
        _expect_network(case, per_node, total.nbytes)
        trial.passed(ranks)
    taken, whole = replay(case.recording, CLUSTER).step_time, steps(case.recording)
    facts = f"{total.nbytes / 1e6:.0f} MB over 2 nodes of {per_node}: {1e6 * taken:.0f} us in {count(whole, 'step')} (replayed)"
    if taken > PAR_TIME:
        raise case.wrong(
            f"Values and bytes are right. {facts}; par is {1e6 * PAR_TIME:.0f} us.",
            "Look at replay(...).plot(): does a link, inside or across, wait for a message that could already be on its way?",
        )
    across = int(network_bytes(case.recording, per_node).max())
    return (
        f"{facts}; par {1e6 * PAR_TIME:.0f} us. Each rank sent {across / 1e6:.2f} MB over the network, 1/{per_node} of "
        "the buffer; the rest stayed on NVLink."
    )


def _explain_nodes(rank: int, got, arrays, per_node: int) -> str:
    factors = combination(got, arrays)
    if factors is None:
        return ""
    node = rank // per_node
    inside = np.arange(len(arrays)) // per_node == node
    if factors[inside].all() and not factors[~inside].any() and per_node > 1:
        return f"This is the sum of node {node} alone: the two nodes were never added."
    same_place = np.arange(len(arrays)) % per_node == rank % per_node
    if factors[same_place].all() and not factors[~same_place].any() and per_node > 1:
        return "This is the sum of the ranks in the same place on both nodes: the ranks of a node were never added."
    return explain_sum(rank, got, arrays)


def _expect_network(case: Case, per_node: int, nbytes: int) -> None:
    """No rank sends more than 1/per_node of the buffer over the network (pieces of unequal size: rounded up)."""
    length = nbytes // 4
    budget = 4 * (-(-length // per_node) + 1)
    sent = network_bytes(case.recording, per_node)
    worst = int(sent.argmax())
    if sent[worst] <= budget:
        return
    users = int(np.count_nonzero(sent))
    if sent[worst] > 1.4 * nbytes:
        why = "A flat ring does that: it crosses the network with every message of two of its ranks."
    elif users <= 2 < case.ranks:
        why = f"Only {count(users, 'rank')} used the network: the other devices have a network port each, too."
    else:
        why = "What should a rank have finished inside its node, before anything crosses the network?"
    raise case.wrong(
        f"The values are right, the way is not: rank {worst} sent {sent[worst]:,} bytes over the network; the budget is "
        f"1/{per_node} of the "
        f"buffer, {budget:,} bytes.",
        why,
    )
