"""What a pipeline that runs must show (lesson 05): run_order, a rank's order of F and B, with the messages between."""

from __future__ import annotations

import random

import numpy as np
import torch

from .exercise import Wrong
from .gradients import expect_gradients
from .inside import Draw, Net
from .judge_schedules import one_f_one_b_of
from .nets_stages import Logged
from .structure import count, expect_by_hand, expect_sends, sends
from .trial import Case, Trial, draw, fresh, shown
from .values import number

_CLOSE = 1e-4  # of the largest number: float32 and divisions
_WIDTH = 4
_SLOPES = (1, 2)  # the gradients of the two losses in the first run


def judge_run_order(trial: Trial) -> str:
    _judge_known(trial)
    for name, p, sizes in (
        ("GPipe", 3, (2, 2)), ("1F1B", 2, (3, 3, 1)), ("last in, first out", 3, (2, 2, 2, 1, 1)), ("1F1B", 4, (3, 3, 3, 2)),
    ):  # fmt: skip
        m = len(sizes)
        orders = [_order(name, rank, p, m) for rank in range(p)]
        nets = [Net(Logged, fresh(), (_WIDTH,), largest=2) for _ in range(p)]
        inputs, targets = ([draw(n, _WIDTH, largest=3) for n in sizes] for _ in range(2))
        case = _run(trial, [(orders[rank], nets[rank], inputs, targets) for rank in range(p)])
        _expect_step(case, nets, inputs, targets)
        _expect_order(case, orders, name)
        boundary = [4 * n * _WIDTH for n in sizes]
        expect_sends(
            case,
            [[(to, b) for to in (rank + 1, rank - 1) if 0 <= to < p for b in boundary] for rank in range(p)],
            lambda rank, case=case, m=m: _explain_sends(case, rank, m),
        )
        trial.passed(p)
    peaks = " ".join(str(_peak(_log(case, rank))) for rank in range(p))
    return (
        f"With p = {p}, m = {m} by 1F1B, rank 1 sent {count(2 * m, 'message')}, {2 * sum(boundary)} bytes, as it would by GPipe; "
        f"at most {peaks} microbatches were in flight. Loss and gradients are those of one process: {sum(_SLOPES) / 2:g} in the "
        f"first run, where losses that are not divided give {sum(_SLOPES)}."
    )


def _order(name: str, rank: int, p: int, m: int) -> list[str]:
    if name == "1F1B":
        return [str(one) for one in one_f_one_b_of(rank, p, m)]
    backwards = range(m) if name == "GPipe" else reversed(range(m))
    return [f"F{i}" for i in range(m)] + [f"B{i}" for i in backwards]


_TELLS = (  # what torch says, in every version, and what that means here
    (
        ("Expected parameter `tensor`", "NoneType"),
        "None was to be sent or received. If it is the gradient of x: what arrives is a new tensor, which autograd does not "
        "follow, so x.grad stays None. Let x require a gradient before the stage runs on it.",
    ),
    (
        ("grad can be implicitly created only for scalar outputs",),
        "Only the last rank has a loss. Everywhere else backward needs the gradient of what this rank sent: the next rank sends it "
        "back.",
    ),
)


def _run(trial: Trial, inputs: list) -> Case:
    """As trial.run, where an error of torch that beginners meet gets a sentence."""
    try:
        return trial.run(inputs, may_change=(0, 1))
    except Wrong as error:
        for words, why in _TELLS:
            if all(word in str(error) for word in words):
                raise Wrong(f"{error}\n{why}") from None
        raise


def _judge_known(trial: Trial) -> None:
    """One rank, two microbatches of one sample, whose losses have the gradients 1 and 2. Their mean is 1.5, their sum 3."""
    net = Net(Logged, fresh(), (1,))
    weight, bias = (net.state().values[name].reshape(-1)[0] for name in ("line.weight", "line.bias"))
    xs = random.sample(range(1, 9), 2)
    ys = [int(weight * x + bias) for x in xs]
    inputs = [draw(1, 1, start=(x,)) for x in xs]
    targets = [draw(1, 1, start=(y - slope,)) for y, slope in zip(ys, _SLOPES)]
    case = _run(trial, [(["F0", "B0", "F1", "B1"], net, inputs, targets)])
    _expect_step(case, [net], inputs, targets)
    _expect_order(case, [["F0", "B0", "F1", "B1"]], "one after the other")
    trial.passed(1)


# ---- values and gradients -----------------------------------------------------------------------------------------------


def _expect_step(case: Case, nets: list[Net], inputs: list[Draw], targets: list[Draw]) -> None:
    expect_by_hand(case)
    _expect_weights_kept(case)
    losses, parts, stale = _one_process(nets, inputs, targets)
    sizes = [one.shape[0] for one in inputs]
    shares = [n / sum(sizes) for n in sizes]
    # losses that are not scaled show in the gradients of the last rank: their sentence names the mistake best
    expect_gradients(
        case,
        1,
        [{name: sum(w * g for w, g in zip(shares, gradients)) for name, gradients in part.items()} for part in parts],
        lambda rank, name: _mistakes(rank, name, parts, shares, stale, len(nets)),
        tolerance=_CLOSE,
    )
    _expect_loss(case, losses, shares)


def _one_process(nets: list[Net], inputs: list[Draw], targets: list[Draw]):
    """([mean loss of each microbatch], [rank: {name: [its gradient for each]}], the same with the last x)."""
    losses, parts, outs, xs = [], [{"line.bias": [], "line.weight": []} for _ in nets], [], []
    with torch.device("cpu"), torch.enable_grad():
        stages = [net.make().line.float() for net in nets]
        for given, target in zip(inputs, targets):
            x, seen, made = given.make(), [], []
            for stage in stages:
                seen.append(x.detach().numpy())
                x = stage(x)
                x.retain_grad()
                made.append(x)
            loss = (x - target.make()).square().mean() / 2
            for stage in stages:
                stage.zero_grad()
            loss.backward()
            losses.append(float(loss.detach()))
            for part, stage in zip(parts, stages):
                part["line.weight"].append(stage.weight.grad.numpy().copy())
                part["line.bias"].append(stage.bias.grad.numpy().copy())
            outs.append([y.grad.numpy() for y in made])
            xs.append(seen)
    latest = {len(seen[0]): seen for seen in xs}  # of each size: where all forwards come first, what a buffer used again holds
    stale = [[g[rank].T @ latest[len(g[rank])][rank] for g in outs] for rank in range(len(nets))]
    return losses, parts, stale


def _mistakes(rank: int, name: str, parts: list, shares: list[float], stale: list, p: int) -> list[tuple[np.ndarray, str]]:
    gradients, m = parts[rank][name], len(shares)
    scaled = [w * g for w, g in zip(shares, gradients)]
    found = [
        (
            sum(gradients),
            "This is the sum of the microbatches' gradients, each of a mean: the loss is not divided. Scale each loss by its share "
            "before backward.",
        ),
        (sum(scaled) / m, "The shares are right, and the whole was divided by the number of microbatches once more."),
        (scaled[-1], "This is the last microbatch's gradient alone: was the gradient set to zero in between?"),
        (sum(w * g for w, g in zip(shares[::-1], gradients)), "Each microbatch has got the share of another one."),
    ]
    if len(set(shares)) > 1:
        found.append(
            (
                sum(gradients) / m,
                f"Every microbatch counts 1/{m} here. The last one is smaller: it should count by its samples.",
            )
        )
    if name == "line.weight" and rank > 0:
        found.append(
            (
                sum(w * g for w, g in zip(shares, stale[rank])),
                "Every backward used the x that came last: all were received into the same buffer. Take a fresh one for each.",
            )
        )
    return found


def _expect_weights_kept(case: Case) -> None:
    for rank in case.active:
        before, after = case.inputs[rank][1].state().values, case.state(rank, 1).values
        if any(not np.array_equal(before[name], after[name]) for name in before if name != "log"):
            raise case.wrong(
                f"Rank {rank}: your function changed the weights. Gradients are asked; the optimiser's step comes later."
            )


def _expect_loss(case: Case, losses: list[float], shares: list[float]) -> None:
    last = case.ranks - 1
    value, right = case.value(last), sum(w * loss for w, loss in zip(shares, losses))
    got = number(value)
    if got is None:
        missing = " Is the `return` missing?" if value is None else ""
        raise case.wrong(
            f"The gradients are right. Rank {last}, the last one, returned {shown(value)}, and should return the mean loss over "
            f"the "
            f"batch.{missing}"
        )
    if abs(got - right) <= _CLOSE * abs(right):
        return
    why = ""
    if abs(got - sum(losses)) <= _CLOSE * sum(losses):
        why = "That is the sum of the microbatches' mean losses."
    elif abs(got - losses[-1]) <= _CLOSE * losses[-1] or abs(got - shares[-1] * losses[-1]) <= _CLOSE * losses[-1]:
        why = "That is of the last microbatch alone."
    raise case.wrong(
        f"The gradients are right. Rank {last}, the last one, should return the mean loss over the batch, {right:.6g}; it returned "
        f"{got:.6g}.",
        why,
    )


# ---- structure ------------------------------------------------------------------------------------------------------------


def _log(case: Case, rank: int) -> list[str]:
    """What a rank's stage ran: ["F0", "F1", "B0", ...]."""
    entries = [int(one) for one in case.state(rank, 1).values["log"] if one > 0]
    return [f"{'F' if one % 2 else 'B'}{(one - 1) // 2}" for one in entries]


def _peak(log: list[str]) -> int:
    most = now = 0
    for one in log:
        now += 1 if one[0] == "F" else -1
        most = max(most, now)
    return most


def _expect_order(case: Case, orders: list[list[str]], name: str) -> None:
    for rank, order in enumerate(orders):
        log = _log(case, rank)
        if log == order:
            continue
        said = f"The gradients are right, the way is not: rank {rank} ran {_words(log)}; its order was {_words(order)} ({name})."
        forwards, m = sum(one[0] == "F" for one in log), len(order) // 2
        if forwards > m:
            why = f"Its stage ran forward {forwards} times for {m} microbatches: keep what a forward gave until its backward."
        elif _peak(log) > _peak(order):
            why = f"So {_peak(log)} microbatches were in flight; by its order it is {_peak(order)}."
        else:
            why = "What a rank does next is for `order` to say."
        raise case.wrong(said, why)


def _words(log: list[str]) -> str:
    return f"{' '.join(log[:16]) or 'nothing'}{' ...' if len(log) > 16 else ''}"


def _explain_sends(case: Case, rank: int, m: int) -> str:
    sent = sends(case.recording, rank)
    if len(sent) > 2 * m:
        return "One message a microbatch and direction is enough: every rank knows the sizes and the targets already."
    if sent and len({size for _, size in sent}) == 1:
        return "All messages have one size: the last microbatch is smaller."
    return ""
