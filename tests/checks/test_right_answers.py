"""Right answers to the exercises of lessons 03 and 04 that go another way than the solutions: each must pass."""

import lesson_04
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lesson_03 import all_reduced, collect, here, scaled, start, summed

from lessons_lib.checks import check
from lessons_lib.checks.inside import Net
from lessons_lib.checks.nets import MeanSquare
from lessons_lib.checks.trial import fresh


def counts_as_tensors(gradient, samples):
    counts = [torch.tensor(0) for _ in range(here()[1])]
    dist.all_gather(counts, torch.tensor(samples))
    return summed(gradient * samples / sum(counts))


def losses_as_objects(model, loss):
    losses = [None] * here()[1]
    dist.all_gather_object(losses, loss)
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, losses.index(min(losses)))


def gradients_asked_for(model, microbatches, samples):
    """autograd.grad in place of backward, and a loss that is looked at and never goes backward."""
    parameters = list(model.parameters())
    model(microbatches[0])
    total = [torch.zeros_like(p) for p in parameters]
    for microbatch in microbatches:
        for one, gradient in zip(total, torch.autograd.grad(scaled(model, microbatch, samples), parameters)):
            one += gradient
    for p, p.grad in zip(parameters, total):
        dist.all_reduce(p.grad)


def list_of_losses(model, microbatches, samples):
    """Losses are kept, their graphs are not."""
    losses = []
    for microbatch in microbatches:
        losses.append(scaled(model, microbatch, samples))
        losses[-1].backward()
    all_reduced(model)


def hooks_that_stay(model, samples):
    """Hooks are set once, and the model keeps what they need, as DistributedDataParallel does."""
    if not hasattr(model, "waiting"):
        model.waiting, model.flying = [], []

        def arrived(p):
            model.waiting.append(p)
            if sum(q.numel() for q in model.waiting) >= 3_000_000:
                model.flying.append(start(list(model.waiting)))
                model.waiting.clear()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(arrived)
    model(samples).backward()
    if model.waiting:
        model.flying.append(start(list(model.waiting)))
    collect(model.flying)
    model.waiting.clear()
    model.flying.clear()


def targets_added_on_the_rank(logits, targets, first):
    """One number holds the logits of all targets on a rank: two numbers a token and one more."""
    largest = logits.detach().amax(1)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    shifted, counted = logits - largest[:, None], targets != -100
    inside = (targets >= first) & (targets < first + logits.shape[1])
    hit = shifted[inside, (targets - first)[inside]].sum()
    sums = lesson_04.Passed.apply(shifted.exp().sum(1))
    return (sums.log()[counted].sum() - lesson_04.Passed.apply(hit)) / counted.sum()


def by_hand(x, gate, up, down):
    class Whole(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, gate, up, down):
            ctx.save_for_backward(x, gate, up, down)
            return summed(F.linear(F.linear(x, gate).relu() * F.linear(x, up), down))

        @staticmethod
        def backward(ctx, gradient):
            x, gate, up, down = ctx.saved_tensors
            a, b, of_hidden = F.linear(x, gate), F.linear(x, up), gradient @ down
            of_a, of_b = of_hidden * b * (a > 0), of_hidden * a.relu()
            return summed(of_a @ gate + of_b @ up), of_a.T @ x, of_b.T @ x, gradient.T @ (a.relu() * b)

    return Whole.apply(x, *lesson_04.cut(gate, up, down))


def seed_and_rank(x, p, seed, alike):
    return lesson_04.dropped(x, p, seed if alike else seed + here()[0])


def as_a_float(gradients, copies):
    total = sum(gradient.double().norm() ** 2 / k for gradient, k in zip(gradients, copies))
    return summed(total).sqrt().item()


@pytest.mark.parametrize(
    ("exercise", "answer", "words"),
    [
        ("average_by_count", counts_as_tensors, "You made 2 calls."),
        ("adopt_best", losses_as_objects, "Rank 1 of 5 had the lowest loss"),
        ("average_over_microbatches", gradients_asked_for, "each rank sent 80 bytes"),
        ("average_over_microbatches", list_of_losses, "each rank sent 80 bytes"),
        ("overlapped_backward", hooks_that_stay, "par 920 us"),
        ("split_cross_entropy", targets_added_on_the_rank, "to combine 2.1 numbers a token"),
        ("gated_mlp", by_hand, "2 all-reduces of 48 bytes"),
        ("drop", seed_and_rank, "Yet rank 0's own mask is the replicated one of the same seed: seed + 1 + rank keeps"),
        ("norm_of_copies", as_a_float, "the norm is 4.472"),
    ],
)
def test_it_passes(exercise, answer, words, capsys):
    check(answer, exercise)
    printed = capsys.readouterr().out
    assert f"Passed: {exercise}." in printed and words in printed


def test_the_advice_about_a_seed_is_given_to_no_other_answer(capsys):
    def answer(x, p, seed, alike):
        return lesson_04.dropped(x, p, lesson_04.seed_of(seed, alike))

    check(answer, "drop")
    assert "Passed: drop." in (printed := capsys.readouterr().out) and "Yet rank 0" not in printed


def test_a_module_notes_what_ran():
    model = Net(MeanSquare, fresh()).make()
    first, second = model(torch.ones(2, 4)), model(torch.ones(1, 4))
    second.backward()
    (3 * first).backward()
    with torch.no_grad():
        model(torch.ones(1, 4))
    assert model.notes == [("F", 0), ("F", 1), ("B", 1), ("B", 0), ("F", 2)]
