"""Programs that use the parallel code wrongly, or unusually: a sentence where it cannot work, right numbers where it can."""

import functools

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from lessons_lib import models, pipelines, run, shapes, splitting  # noqa: E402
from lessons_lib.errors import RankFailed  # noqa: E402
from lessons_lib.parallel import data, pipeline, schedules, tensor  # noqa: E402

sgd = functools.partial(torch.optim.SGD, lr=0.1)


def refused(program, *args, ranks=2) -> str:
    with pytest.raises(RankFailed) as raised:
        run(program, *args, ranks=ranks)
    return str(raised.value)


def pair(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)).double()


def mean_square(y, targets):
    return (y - targets).square().mean()


# ---- data parallel -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["Zero2", "Zero3", "Buckets"])
def test_two_that_take_the_gradients_of_one_model(first):
    def program():
        model = pair()
        data.Buckets(model) if first == "Buckets" else getattr(data, first)(model, [model[0]], sgd)
        data.Zero2(model, [model[0]], sgd)

    assert "has a hook already" in refused(program)


def test_older_buckets_are_named_and_ranks_outside_the_group_refused():
    def twice():
        model, x = pair(), torch.ones(2, 4).double()
        data.Buckets(model)
        buckets = data.Buckets(model)
        for _ in range(2):
            model(x).sum().backward()
            buckets.wait()

    def outside(call):
        call(dist.new_group([0]))

    assert "Older Buckets of the same model go on watching it" in refused(twice)
    for call in (lambda group: data.share_of_batch(1, group), lambda group: data.parameters_in_use(pair(), group)):
        assert "Rank 1 is not a member of this group" in refused(outside, call)


def test_sharded_after_buckets_are_removed():
    def program():
        model = pair()
        data.Buckets(model).remove()
        zero = data.Zero2(model, [model[0]], sgd)
        model(torch.ones(2, 4).double()).sum().backward()
        zero.reduce_gradients()
        zero.step()
        return [p.detach() for p in model.parameters()]

    model = pair()
    model(torch.ones(2, 4).double()).sum().backward()
    sgd(model.parameters()).step()
    for found in run(program, ranks=2).results:
        torch.testing.assert_close(found, [p.detach() for p in model.parameters()])


@pytest.mark.parametrize("way", ["Zero2", "Zero3"])
@pytest.mark.parametrize("samples", [1, 2])
def test_a_rank_without_samples_under_zero(way, samples):
    """Units of one size would be reduced in another order there, and mixed: refused. With any sample and share 0 it is right."""
    batch = torch.arange(8.0).double().view(2, 4)[:samples]

    def program(help_out):
        model = pair()
        zero = getattr(data, way)(model, list(model), sgd)
        mine = data.split_batch(batch)
        zero.share = len(mine) / samples
        mine = batch[:1] if help_out and not len(mine) else mine
        if len(mine):
            model(mine).square().mean().backward()
        zero.reduce_gradients()
        zero.step()
        if way == "Zero3":
            zero.gather()
        return [p.detach() for p in model.parameters()]

    model = pair()
    model(batch).square().mean().backward()
    sgd(model.parameters()).step()
    for found in run(program, True, ranks=3).results:
        torch.testing.assert_close(found, [p.detach() for p in model.parameters()])
    assert "No backward has run on this rank" in refused(program, False, ranks=3)


def test_small_mistakes_of_data_parallel():
    for call, words in (
        (lambda: data.clip_gradients(1.0), "no gradients to clip"),
        (lambda: data.accumulate_gradients(sum, [1, 2]), "must be a tensor with the samples along its first dimension, not 1"),
        (lambda: data.accumulate_gradients(sum, [torch.tensor(1.0)]), "must be a tensor with the samples"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            call()

    def program():
        data.Zero1(pair(), lambda shards: None)

    assert "make_optimizer must return an optimizer" in refused(program)


# ---- pipeline parallel -------------------------------------------------------------------------------------------------------


class Turned(nn.Module):
    """A convolution along the sequence: its output is not contiguous."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.convolution = nn.Conv1d(4, 4, 1).double()

    def forward(self, x):
        return self.convolution(x.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize("way", ["gpipe_step", "one_f_one_b_step", "zero_bubble_h1"])
@pytest.mark.parametrize("frozen", [(), (0,), (0, 1)])
def test_stages_that_are_frozen_or_turn_their_output(way, frozen):
    x = torch.rand(6, 5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def program(make):
        rank, p = dist.get_rank(), dist.get_world_size()
        stage = pipeline.Stage([make(rank).requires_grad_(rank not in frozen)], rank, p, torch.empty_like)
        microbatches = pipeline.split_into_microbatches(x, -x, 4)
        if way.endswith("step"):
            getattr(pipeline, way)(stage, microbatches, mean_square)
        else:
            pipeline.run_schedule(stage, schedules.zero_bubble_h1(p, 4), microbatches, mean_square)
        return [p.grad for p in stage.parameters()]

    whole = nn.Sequential(*[Turned(rank).requires_grad_(rank not in frozen) for rank in range(3)])
    mean_square(whole(x), -x).backward()
    for found, part in zip(run(program, Turned, ranks=3).results, whole):
        torch.testing.assert_close(found, [p.grad for p in part.parameters()])


def by_orders(stage, microbatches, mean_loss):
    pipeline.run_schedule(stage, schedules.gpipe(2, 2), microbatches, mean_loss)


@pytest.mark.parametrize("step", [pipeline.gpipe_step, pipeline.one_f_one_b_step, by_orders])
@pytest.mark.parametrize(
    "change, words",
    [
        ({"stage": None}, "must be this rank's"),
        ({"stage": 3}, "must be this rank's"),
        ({"stage": "swapped"}, "so they must be stages [0] of 2, not [1] of 2"),
        ({"microbatches": []}, "microbatches must be a list from split_into_microbatches"),
        ({"microbatches": 3}, "microbatches must be a list from split_into_microbatches"),
        ({"mean_loss": None}, "mean_loss must be a function"),
        ({"mean_loss": lambda y, targets: y - targets}, "returned a tensor of (2, 4), but must return a tensor of one number"),
        ({"mean_loss": lambda y, targets: None}, "returned None, but must return a tensor of one number"),
        ({"tied": True}, "tied must be the weight that is also on another stage"),
    ],
)
def test_steps_by_hand_refuse_what_they_cannot_run_on(step, change, words):
    def program():
        rank, x = dist.get_rank(), torch.ones(4, 4).double()
        index = 1 - rank if change.get("stage") == "swapped" else rank
        stage = pipeline.Stage([pair()], index, 2, torch.empty_like, change.get("tied"))
        given = {"stage": stage, "microbatches": pipeline.split_into_microbatches(x, x, 2), "mean_loss": mean_square}
        given |= {key: value for key, value in change.items() if value != "swapped"}
        given.pop("tied", None)
        step(**given)

    assert words in refused(program)


def test_pipelines_side_by_side_have_ends_of_their_own():
    def program():
        groups = [dist.new_group([0, 1, 2]), dist.new_group([5, 3, 4])]
        group = groups[dist.get_rank() // 3]
        ends = pipeline.first_and_last(group)
        if ends is dist.GroupMember.NON_GROUP_MEMBER:
            return None
        x = torch.tensor([1.0 + dist.get_rank()])
        dist.all_reduce(x, group=ends)
        return x.item()

    assert run(program, ranks=6).results == [4.0, None, 4.0, 10.0, None, 10.0]


def test_a_loss_that_is_none_and_ends_that_are_missing():
    def no_loss():
        pipeline.loss_everywhere(None)

    def a_number():
        pipeline.loss_everywhere(0.5)

    def no_ends():
        rank, table = dist.get_rank(), nn.Linear(4, 4)
        stage = pipeline.Stage([table], rank, 2, torch.empty_like, table.weight)
        pipeline.copy_tied_weight(stage, None)

    def no_group():
        pipeline.copy_tied_weight([], 0)

    assert "ends must be what first_and_last(group) returned, not 0" in refused(no_group)
    assert "loss is None on rank 1 of 2" in refused(no_loss)
    assert "loss is 0.5 on rank 0 of 2" in refused(a_number)
    assert "ends is None, but this rank holds one of the two copies" in refused(no_ends)


class Cast(nn.Module):
    """A linear layer under autocast: the product is of the weight in bfloat16."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.linear(x).float()


def test_autocast_in_stages_whose_backward_is_split():
    x = torch.rand(6, 4, generator=torch.Generator().manual_seed(1))

    def program(make):
        rank, p = dist.get_rank(), dist.get_world_size()
        stage = pipeline.Stage([make(rank)], rank, p, torch.empty_like)
        microbatches = pipeline.split_into_microbatches(x, -x, 1)
        pipeline.run_schedule(stage, schedules.zero_bubble_h1(p, 1), microbatches, mean_square)
        return [p.grad for p in stage.parameters()]

    whole = nn.Sequential(Cast(0), Cast(1))
    mean_square(whole(x), -x).backward()
    for found, part in zip(run(program, Cast, ranks=2).results, whole):
        torch.testing.assert_close(found, [p.grad for p in part.parameters()], rtol=0, atol=0)


def test_times_and_switches_of_schedules():
    orders = schedules.gpipe(2, 2)
    for make in (int, np.int8, np.uint8, np.int64, np.float32):  # small types would overflow: 6 x 100
        assert schedules.timed(orders, forward=make(100), backward=make(100)).makespan == 600
    for call, words in (
        (lambda: schedules.timed(orders, forward=10**400), "is far too large: it must be a finite number above 0, and at most 1e"),
        (lambda: schedules.timed(orders, forward=1e308), "is far too large: it must be a finite number above 0"),
        (lambda: schedules.greedy(2, 2, split="no"), "split must be True or False, not 'no'"),
        (lambda: schedules.greedy(2, 2, split=2), "split must be True or False, not 2"),
        (lambda: schedules.par(2, 2, split=None), "split must be True or False, not None"),
        (lambda: schedules.par(2, np.float64(2)), "The number of microbatches m must be a whole number"),
        (lambda: schedules.check_orders(orders, split=1), "split must be True or False, not 1"),
        (lambda: pipelines.record_pipeline(orders, 1, 1, weight=-1), "flops=-1"),
        (lambda: pipelines.work(10**400), "flops=1000"),
        (lambda: splitting.state_bytes_per_parameter(4, gradient_bytes=np.array([2, 4])), "must be 2 .bf16. or 4"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


# ---- tensor parallel ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", [{"padding_idx": 0}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_an_embedding_that_does_more_than_look_up(option):
    def program():
        tensor.VocabularyParallelEmbedding(nn.Embedding(8, 4, **option))

    assert f"The embedding has {next(iter(option))}=" in refused(program)


def test_a_loss_of_logits_that_are_turned():
    logits = torch.rand(5, 2, 8, generator=torch.Generator().manual_seed(1)).double()
    targets = torch.arange(10).view(2, 5) % 8

    def program():
        mine = logits.chunk(2, -1)[dist.get_rank()].requires_grad_()
        tensor.vocabulary_parallel_loss(mine.transpose(0, 1), targets).backward()
        return mine.grad

    whole = logits.clone().requires_grad_()
    nn.functional.cross_entropy(whole.transpose(0, 1).flatten(0, 1), targets.flatten()).backward()
    torch.testing.assert_close(torch.cat(run(program, ranks=2).results, -1), whole.grad)


def test_what_a_random_state_is():
    def program():
        tensor.ParallelMLP(models.MLP(shapes.TINY), random=3)

    assert "random must be RandomStates(seed, group), or None where nothing drops out, not 3" in refused(program, ranks=1)
