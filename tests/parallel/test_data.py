"""Data parallel by hand: equal to one process, to DDP and to FSDP2; the wrong numbers beside the right ones."""

import functools

import pytest

torch = pytest.importorskip("torch")
import data_programs as programs  # noqa: E402
import torch.distributed as dist  # noqa: E402
from data_programs import REPLICATED, SAMPLES, SHARDED, alone, trained  # noqa: E402
from torch import nn  # noqa: E402

from lessons_lib import run  # noqa: E402
from lessons_lib.parallel import data  # noqa: E402
from lessons_lib.recording import COLLECTIVE  # noqa: E402


def close(got, expected):
    assert len(got) == len(expected)
    for a, b in zip(got, expected):
        if b is None:
            assert a is None
        else:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def calls(recording, rank=0):
    """(kind, bytes) of the rank's collectives, in order."""
    events = recording.events[rank]
    return [(recording.ops[e["op"]], int(e["nbytes"])) for e in events if e["kind"] == COLLECTIVE]


# ---- values ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", SAMPLES)
@pytest.mark.parametrize("way", [*REPLICATED, "ddp"])
def test_gradients_and_five_steps_equal_one_process_and_ddp(ranks, way):
    gradients, parameters = alone(SAMPLES[ranks])
    for found in trained(ranks).results:
        close(found[way][0], gradients)
        close(found[way][1], parameters)
        close(found[way][1], found["ddp"][1])


@pytest.mark.parametrize("ranks", SAMPLES)
@pytest.mark.parametrize("way", SHARDED)
def test_five_sharded_steps_equal_one_process_and_fsdp2(ranks, way):
    for found in trained(ranks).results:
        gradients, parameters = alone(SAMPLES[ranks])
        close(found[way][0], parameters)
        close(found[way][0], found["fsdp2"][0])
        close(found[way][3], gradients)
        close(found[way][3], found["fsdp2"][1])


def test_every_rank_ends_with_the_very_same_parameters():
    for way in REPLICATED:
        one, *others = [found[way][1] for found in trained(3).results]
        assert all(torch.equal(a, b) for other in others for a, b in zip(one, other))


FROZEN = ("blocks.1.mlp.up.weight", "embedding.positions.weight")


def test_frozen_parameters_clipping_and_microbatches():
    def program(samples):
        found = [programs.replicated(samples, way, FROZEN, 0.5)[1] for way in ("one message a parameter", "accumulated, buckets")]
        return found + [programs.sharded(samples, way, FROZEN, 0.5, microbatches=2)[0] for way in SHARDED]

    expected = alone(6, freeze=FROZEN, max_norm=0.5)[1]
    assert not torch.allclose(expected[0], alone(6)[1][0], rtol=1e-6)  # clipping and freezing do make a difference
    for results in run(program, 6, ranks=2).results:
        for parameters in results:
            close(parameters, expected)


def test_a_rank_without_samples_adds_nothing():
    def program():
        return programs.replicated(2, "one message a parameter")[0], programs.replicated(2, "buckets")[0]

    for one_each, buckets in run(program, ranks=3).results:
        close(one_each, alone(2)[0])
        close(buckets, alone(2)[0])


def test_a_mean_over_no_samples_is_nan_and_still_adds_nothing():
    def program():
        mine, found = data.split_batch(torch.tensor([3.0, 5.0])), []
        for average in (data.average_gradients, data.average_gradients_flat):
            weight = nn.Parameter(torch.ones(()))
            gradient_of_mean(weight, mine)
            average([weight], len(mine) / 2)
            found.append(weight.grad.item())
        return found

    assert run(program, ranks=3).results == [[4.0, 4.0]] * 3


class Branches(nn.Module):
    """Rank 0 uses `a`, the others `b`; nobody uses `c`; all use `shared`, twice."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.shared = (nn.Parameter(torch.full((3,), value)) for value in (1.0, 2.0, 3.0, 4.0))

    def forward(self, x, first):
        return ((self.a if first else self.b) * self.shared * (x + self.shared)).sum()


def test_parameters_that_not_all_ranks_use():
    def program(make):
        rank, found = dist.get_rank(), []
        for average in (data.average_gradients, data.average_gradients_flat, None):
            model = make()
            buckets = data.Buckets(model, 1) if average is None else None  # one parameter a bucket
            model(torch.arange(3.0), rank == 0).backward()
            if average is None:
                buckets.wait()
            else:
                used = data.parameters_in_use(model)
                assert [id(p) for p in used] == [id(p) for p in (model.a, model.b, model.shared)]
                average(used, 1 / dist.get_world_size())
                assert model.c.grad is None
            found.append([p.grad for p in (model.a, model.b, model.shared)])
        return found

    model, x = Branches(), torch.arange(3.0)
    (sum(model(x, rank == 0) for rank in range(3)) / 3).backward()
    for results in run(program, Branches, ranks=3).results:
        for gradients in results:
            torch.testing.assert_close(gradients, [model.a.grad, model.b.grad, model.shared.grad])


class Spare(nn.Module):
    """Two layers, each with a weight that nobody uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        for layer in self.layers:
            layer.unused = nn.Parameter(torch.ones(4))
        self.scale = nn.Parameter(torch.full((3,), 2.0))

    def forward(self, x):
        return (self.scale * self.layers[1](self.layers[0](x).relu())).square().mean()


def test_shards_with_parameters_that_nobody_uses_and_evaluation_between_steps():
    sgd = functools.partial(torch.optim.SGD, lr=0.1)

    def program(make):
        found = []
        for way in SHARDED:
            model = make()
            units = {} if way == "zero1" else {"modules": model.layers}
            zero = {"zero1": data.Zero1, "zero2": data.Zero2, "zero3": data.Zero3}[way](model, make_optimizer=sgd, **units)
            losses = []
            for step in range(3):
                x = torch.arange(12.0).view(4, 3) + step
                with torch.no_grad():
                    losses.append(model(x).item())
                model(data.split_batch(x)).backward()
                zero.reduce_gradients()
                zero.step()
            found.append(losses)
        return found

    model, losses = Spare(), []
    optimizer = sgd(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        loss = model(torch.arange(12.0).view(4, 3) + step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] != losses[2]
    for results in run(program, Spare, ranks=2).results:
        for found in results:
            assert found == pytest.approx(losses, rel=1e-4)


def test_broadcast_parameters_hands_on_buffers_and_counts_as_the_model():
    def program():
        torch.manual_seed(dist.get_rank())
        model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
        model[1].running_mean.fill_(dist.get_rank())
        data.broadcast_parameters(model, root=1)
        return model.state_dict()

    recording = run(program, ranks=3)
    torch.manual_seed(1)
    expected = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)).state_dict()
    expected["1.running_mean"].fill_(1)
    for state in recording.results:
        torch.testing.assert_close(state, expected, rtol=0, atol=0)
    assert sorted(calls(recording)) == sorted(("broadcast", t.numel() * t.element_size()) for t in expected.values())


@pytest.mark.parametrize("samples", [0, 1, 5, 12])
def test_split_batch_gives_every_sample_once_and_shares_sum_to_one(samples):
    def program():
        mine = data.split_batch(torch.arange(samples))
        return mine, data.share_of_batch(len(mine)) if samples else 1 / 3

    results = run(program, ranks=3).results
    assert torch.cat([mine for mine, _ in results]).tolist() == list(range(samples))
    assert max(len(mine) for mine, _ in results) - min(len(mine) for mine, _ in results) <= 1
    assert sum(share for _, share in results) == pytest.approx(1)
    if samples:
        assert [share for _, share in results] == [len(mine) / samples for mine, _ in results]


# ---- wrong numbers and right ones --------------------------------------------------------------------------------------------


def gradient_of_mean(weight, samples):
    (weight * samples).mean().backward()


def test_the_mean_is_over_samples_not_over_ranks():
    def program():
        rank, found = dist.get_rank(), []
        sizes, means = (4, 4, 4, 1), (80.0, 84.0, 89.0, 288.0)
        mine = torch.full((sizes[rank],), means[rank])
        for share in (1 / 4, sizes[rank] / 13):
            weight = nn.Parameter(torch.ones(()))
            gradient_of_mean(weight, mine)
            data.average_gradients([weight], share)
            found.append(weight.grad.item())
        return found

    for wrong, right in run(program, ranks=4).results:
        assert (wrong, right) == (135.25, pytest.approx(100.0))


def test_the_loss_of_each_microbatch_is_divided():
    weight, summed = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))
    for microbatch in (torch.ones(2), torch.full((2,), 2.0)):
        gradient_of_mean(summed, microbatch)
    loss = data.accumulate_gradients(lambda x: (weight * x).mean(), [torch.ones(2), torch.full((2,), 2.0)])
    assert (summed.grad.item(), weight.grad.item(), loss.item()) == (3.0, 1.5, 1.5)
    uneven = nn.Parameter(torch.ones(()))
    data.accumulate_gradients(lambda x: (uneven * x).mean(), list(torch.arange(5.0).tensor_split(2)))
    assert uneven.grad.item() == 2.0  # the mean of 0 to 4, in parts of 3 and 2


def test_the_norm_counts_replicas_once():
    def program():
        shard, replica = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        shard.grad, replica.grad = torch.tensor([2.0]), torch.tensor([2.0])
        wrong = data.clip_gradients(100.0, sharded=[shard, replica]).item()
        right = data.clip_gradients(1.0, replicated=[replica, replica], sharded=[shard]).item()
        return wrong, right, shard.grad.item(), replica.grad.item()

    recording = run(program, ranks=4)
    for wrong, right, shard, replica in recording.results:
        assert (round(wrong, 3), round(right, 3)) == (5.657, 4.472)
        assert shard == replica == pytest.approx(2 / 20**0.5, rel=1e-5)
    assert calls(recording) == [("all_reduce", 4)] * 2


def test_a_hook_and_microbatches():
    def program():
        rank = dist.get_rank()
        microbatches = [torch.tensor([1.0 + rank]), torch.tensor([5.0 + rank])]

        def mean_of_last(gradient):  # a hook on the tensor sees this backward's gradient, not what has accumulated
            gradient = gradient.clone()
            dist.all_reduce(gradient)
            return gradient / 2

        last_only = nn.Parameter(torch.ones(()))
        gradient_of_mean(last_only, microbatches[0] / 2)
        last_only.register_hook(mean_of_last)
        gradient_of_mean(last_only, microbatches[1] / 2)

        sum_each = nn.Parameter(torch.ones(()))  # sums the accumulated gradient, the first microbatch's a second time
        sum_each.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
        for microbatch in microbatches:
            gradient_of_mean(sum_each, microbatch / 2)

        right = nn.Parameter(torch.ones(()))
        buckets = data.Buckets([right])
        data.accumulate_gradients(lambda x: (right * x).mean(), microbatches, buckets)
        buckets.wait()
        found = last_only.grad.item(), sum_each.grad.item() / 2, right.grad.item()

        right.grad = None
        gradient_of_mean(right, microbatches[0])
        try:
            gradient_of_mean(right, microbatches[1])
        except RuntimeError as error:
            refusal = str(error)
        buckets.wait()
        buckets.remove()
        return found, refusal

    for rank, (found, refusal) in enumerate(run(program, ranks=2).results):
        assert found == ((3.25, 3.75)[rank], 4.25, 3.5)  # drifted apart; counted twice; the mean of 1, 2, 5 and 6
        assert "second time before buckets.wait()" in refusal and "no_synchronisation" in refusal
