"""What each rank calls, in order, to run a schedule: receive, compute, send, wait. The same list is run on real ranks and replayed.

The receive for the next action is posted before this one computes, so that a message moves meanwhile. A send is waited for when
that can hold nobody up: when a later message from the same rank proves that it has received, and at the end. Imports no torch.
"""

from __future__ import annotations

from typing import NamedTuple

from .actions import Action, needs, size_of

RECEIVE, ARRIVED, COMPUTE, SEND, SENT = "receive", "arrived", "compute", "send", "sent"


class Step(NamedTuple):
    """One action of a rank: who sends what it needs (`source`), who needs what it gives (`target`). None: no message."""

    action: Action
    source: int | None
    target: int | None


class Call(NamedTuple):
    """RECEIVE: post the receive that `step` needs. ARRIVED: wait for it. SEND: start to send its result. SENT: wait for that."""

    kind: str
    step: int


def tag_of(action: Action, stage: int, microbatches: int) -> int:
    """A number for each message, from the action and the stage that needs it: neighbours may take microbatches in any order."""
    return (stage * 2 + (action[0] == "B")) * microbatches + action[1]


def steps_of(orders) -> list[list[Step]]:
    """For every rank its actions, each with its messages."""
    return _steps(orders)[0]


def calls_of(orders) -> list[list[Call]]:
    """For every rank what it calls, in order."""
    steps, place, reader = _steps(orders)
    found = []
    for rank, mine in enumerate(steps):
        calls: list[Call] = []
        flying: dict[int, list[tuple[int, int]]] = {}  # receiver: (receiver's step that uses the message, own step), in order
        posted = [False] * len(mine)

        def post(n, mine=mine, calls=calls, posted=posted):
            calls.append(Call(RECEIVE, n))
            posted[n] = True

        done: set[Action] = set()
        for n, (one, source, target) in enumerate(mine):
            if source is not None:
                if not posted[n]:
                    post(n)
                calls.append(Call(ARRIVED, n))
                sent = flying.get(source)
                if sent:
                    seen = place[source, one]  # the step of the source that made this message
                    calls += [Call(SENT, own) for used, own in sent if used <= seen]
                    flying[source] = [pair for pair in sent if pair[0] > seen]
            if n + 1 < len(mine):
                after, coming, _ = mine[n + 1]
                # what arrives for a backward looks like what its forward gave: so that must have run
                if coming is not None and (after[0] == "F" or Action("F", after[1], after[2]) in done):
                    post(n + 1)
            calls.append(Call(COMPUTE, n))
            done.add(one)
            if target is not None:
                calls.append(Call(SEND, n))
                flying.setdefault(target, []).append((reader[rank, one], n))
        left = sorted(own for sent in flying.values() for _, own in sent)
        found.append(calls + [Call(SENT, own) for own in left])
    return found


def _steps(orders):
    """(steps; the step that made the message for (source, action); the step that reads what (rank, action) made)."""
    p, v = len(orders), size_of(orders)[1]
    where = {(r, one): n for r, order in enumerate(orders) for n, one in enumerate(order)}
    steps, place, target, reader = [[] for _ in orders], {}, {}, {}
    sources = {}
    for r, order in enumerate(orders):
        for n, one in enumerate(order):
            for made in needs(one, r, p, v):
                if made[0] != r:
                    sources[r, one] = made[0]
                    place[made[0], one] = where[made]
                    target[made], reader[made] = r, n
    for r, order in enumerate(orders):
        steps[r] = [Step(one, sources.get((r, one)), target.get((r, one))) for one in order]
    return steps, place, reader
