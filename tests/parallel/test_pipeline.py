"""Pipeline parallel by hand: equal to one process in values and gradients, however it is scheduled; what is refused."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import pipeline_programs as programs  # noqa: E402
import torch.distributed as dist  # noqa: E402
from pipeline_programs import SHAPE, batch, model_of, one_process, pipelined, run_ways, train, trained  # noqa: E402
from torch import nn  # noqa: E402

from lessons_lib import run, shapes  # noqa: E402
from lessons_lib.errors import Deadlock, RankFailed  # noqa: E402
from lessons_lib.models import next_token_loss  # noqa: E402
from lessons_lib.parallel import pipeline, schedules  # noqa: E402

# p, samples, m: fewer microbatches than ranks, as many, more; the last ones smaller where m does not divide the samples
SIZES = [(1, 5, 3), (2, 3, 1), (2, 3, 2), (2, 7, 4), (3, 4, 2), (3, 5, 3), (3, 9, 6), (4, 5, 3), (4, 4, 4), (4, 11, 8)]


def close(found, expected):
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


# ---- values ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p,samples,m", SIZES)
def test_losses_gradients_and_parameters_equal_one_process(p, samples, m):
    losses, gradients, parameters = one_process(samples)
    results = trained(p, samples, m).results
    for way in run_ways(p, m):
        seen = set()
        for found in results:
            torch.testing.assert_close(found[way][0], losses)
            close(found[way][1], gradients)
            close(found[way][2], parameters)
            seen |= found[way][1].keys()
        assert seen == gradients.keys(), way


@pytest.mark.parametrize("p,samples,m", SIZES)
def test_the_tied_weight_is_the_very_same_on_both_ends(p, samples, m):
    for way in run_ways(p, m):
        first, last = trained(p, samples, m).results[0][way], trained(p, samples, m).results[-1][way]
        for part in (1, 2):
            assert torch.equal(first[part]["embedding.tokens.weight"], last[part]["embedding.tokens.weight"])


@pytest.mark.parametrize("way", ["1F1B by hand", "ZB-H1", "interleaved"])
def test_ranks_that_are_seeded_differently(way):
    p, samples, m = 2, 5, 4

    def program():
        return pipelined(samples, m, way)

    whole = model_of()
    cuts = pipeline.cut_into_stages(whole, p * run_ways(p, m)[way][0])
    for stage in cuts:  # each rank's blocks come from its own seed; the tied weight from rank 0
        source = pipeline.cut_into_stages(model_of(stage.index % p), len(cuts))[stage.index]
        tied = whole.embedding.tokens.weight.detach().clone()
        stage.load_state_dict(source.state_dict())
        with torch.no_grad():
            whole.embedding.tokens.weight.copy_(tied)
    losses, gradients, parameters = train(whole, samples)
    for found in run(program, ranks=p).results:
        torch.testing.assert_close(found[0], losses)
        close(found[1], gradients)
        close(found[2], parameters)


@pytest.mark.parametrize("shape", [replace(SHAPE, tied=False), replace(shapes.TINY_LLAMA, layers=8, length=16)])
def test_other_shapes_with_layers_as_given(shape):
    def program():
        return pipelined(5, 3, "ZB-H1", 0, shape, [1, 4, 3])

    losses, gradients, parameters = train(model_of(shape=shape), 5, shape=shape)
    results = run(program, ranks=3).results
    assert [sum(name.endswith("mlp.up.weight") for name in found[1]) for found in results] == [1, 4, 3]
    for found in results:
        torch.testing.assert_close(found[0], losses)
        close(found[1], gradients)
        close(found[2], parameters)


def test_a_subgroup_runs_its_own_pipeline():
    def program():
        pairs = [dist.new_group([3, 1]), dist.new_group([0, 2])]
        group = pairs[dist.get_rank() % 2 == 0]
        rank, p = dist.get_rank(group), dist.get_world_size(group)
        model = model_of()
        stage, ends = pipeline.cut_into_stages(model, p)[rank], pipeline.first_and_last(group)
        orders = schedules.zero_bubble_h1(p, 3)
        loss = pipeline.run_schedule(stage, orders, batch(0, 5, 3), next_token_loss, group)
        pipeline.sum_tied_gradients(stage, ends)
        first = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        again = pipeline.one_f_one_b_step(stage, batch(0, 5, 3), next_token_loss, group)
        pipeline.sum_tied_gradients(stage, ends)
        second = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return pipeline.loss_everywhere(loss, group), pipeline.loss_everywhere(again, group), first, second

    losses, gradients, _ = one_process(5)
    for one, two, first, second in run(program, ranks=4).results:
        assert one.item() == two.item() == pytest.approx(losses[0].item(), rel=1e-12)
        close(first, gradients)
        close(second, gradients)


class Branching(nn.Module):
    """A linear layer used twice, a weight used outside of linear layers, a frozen layer, and three dimensions."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.twice, self.frozen = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.scale = nn.Parameter(torch.rand(6))
        self.frozen.weight.requires_grad_(False)
        self.double()

    def forward(self, x):
        x = self.twice(self.twice(x).tanh()) * self.scale
        return x + self.frozen(x) @ self.twice.weight  # the same weight, outside of F.linear


@pytest.mark.parametrize("way", ["1F1B", "ZB-H1"])
def test_shared_and_frozen_layers(way):
    def data():
        return torch.rand(4, 3, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64)

    def program(make):
        rank, p = dist.get_rank(), dist.get_world_size()
        stage = pipeline.Stage([make(rank)], rank, p, torch.empty_like)
        orders = {"1F1B": schedules.one_f_one_b, "ZB-H1": schedules.zero_bubble_h1}[way](p, 4)
        microbatches = pipeline.split_into_microbatches(data(), -data(), 4)
        loss = pipeline.run_schedule(stage, orders, microbatches, programs.mean_square)
        return pipeline.loss_everywhere(loss), [p.grad for p in stage.parameters()]

    whole = nn.Sequential(*[Branching(rank) for rank in range(3)])
    loss = programs.mean_square(whole(data()), -data())
    loss.backward()
    for (found, gradients), part in zip(run(program, Branching, ranks=3).results, whole):
        torch.testing.assert_close(found, loss.detach())
        torch.testing.assert_close(gradients, [p.grad for p in part.parameters()])


@pytest.mark.parametrize("p,m,v", [(2, 3, 2), (3, 4, 1), (4, 3, 2)])
def test_any_order_that_can_run_runs_and_gives_the_same(p, m, v):
    def program():
        rank, found = dist.get_rank(), []
        for seed in range(8):
            stages = pipeline.cut_into_stages(model_of(), p * v)[rank::p]
            orders = programs.any_orders(seed, p, m, v, split=seed % 2 == 1)
            loss = pipeline.run_schedule(stages, orders, batch(0, m + 1, m), next_token_loss)
            found.append((loss, [q.grad for q in stages[0].parts[-1].parameters()]))
        return found

    losses, whole = one_process(m + 1)[0], model_of()
    next_token_loss(whole(programs.tokens(0, m + 1)[:, :-1]), programs.tokens(0, m + 1)[:, 1:]).backward()
    cuts = pipeline.cut_into_stages(whole, p * v)
    for rank, results in enumerate(run(program, ranks=p).results):
        for loss, gradients in results:
            if rank == p - 1:
                torch.testing.assert_close(loss, losses[0])
            if v == 2 or rank < p - 1:  # else the head is here, whose weight is tied
                torch.testing.assert_close(gradients, [q.grad for q in cuts[rank].parts[-1].parameters()])


def test_the_loss_is_divided_among_microbatches():
    def program(divide):
        weight = nn.Linear(1, 1, bias=False)
        nn.init.ones_(weight.weight)
        x = torch.tensor([[1.0], [2.0]])
        microbatches = pipeline.split_into_microbatches(x, x, 2)
        if not divide:
            microbatches = [one._replace(share=1.0) for one in microbatches]
        pipeline.gpipe_step(pipeline.Stage([weight], 0, 1), microbatches, lambda y, _: y.mean())
        return weight.weight.grad.item()

    assert [run(program, divide, ranks=1).results[0] for divide in (False, True)] == [3.0, 1.5]


def test_weight_gradients_come_with_w_and_not_before():
    stage = pipeline.cut_into_stages(model_of(), 1)[0]
    with pipeline.WeightGradientsLater() as later:
        y = next_token_loss(stage(programs.tokens(0, 2)[:, :-1]), programs.tokens(0, 2)[:, 1:])
    y.backward()
    linear = {id(m.weight) for m in stage.modules() if isinstance(m, nn.Linear)}
    before = {id(p) for p in stage.parameters() if p.grad is not None}
    assert before & linear == {id(stage.parts[0].tokens.weight)}  # tied: the embedding's own part
    assert len(later.jobs) == 4 * SHAPE.layers + 1
    later.run()
    assert all(p.grad is not None for p in stage.parameters()) and not later.jobs
    kept = {name: p.grad.clone() for name, p in stage.named_parameters()}
    later.run()
    close({name: p.grad for name, p in stage.named_parameters()}, kept)


@pytest.mark.parametrize("shape", [(5,), (1, 5), (3, 5), (2, 3, 5), (2, 1, 3, 5)])
def test_split_linear_layers_take_any_number_of_dimensions(shape):
    torch.manual_seed(len(shape))
    one, other = nn.Linear(5, 4).double(), nn.Linear(5, 4).double()
    other.load_state_dict(one.state_dict())
    x = torch.rand(shape, dtype=torch.float64, requires_grad=True)
    again = x.detach().clone().requires_grad_()
    one(x).sin().sum().backward()
    with pipeline.WeightGradientsLater() as later:
        y = other(again).sin().sum()
    y.backward()
    assert other.weight.grad is None
    torch.testing.assert_close((again.grad, other.bias.grad), (x.grad, one.bias.grad))
    later.run()
    torch.testing.assert_close(other.weight.grad, one.weight.grad)


# ---- stages and microbatches -----------------------------------------------------------------------------------------------


def test_layers_are_cut_evenly_and_the_middle_takes_what_is_left():
    def counts(*args):
        return [len(cut) for cut in pipeline.layers_of_stages(*args)]

    assert counts(8, 4) == [2, 2, 2, 2] and counts(10, 4) == [2, 3, 3, 2] and counts(7, 3) == [2, 3, 2]
    assert counts(22, 8) == [2, 3, 3, 3, 3, 3, 3, 2]  # as in arXiv:2401.10241: the first and the last have one layer less
    assert counts(4, 4, [0, 2, 2, 0]) == [0, 2, 2, 0]
    for layers in range(1, 12):
        for stages in range(1, layers + 1):
            cuts = pipeline.layers_of_stages(layers, stages)
            assert [layer for cut in cuts for layer in cut] == list(range(layers))
            assert max(map(len, cuts)) - min(map(len, cuts)) <= 1


def test_microbatches_hold_every_sample_once_and_their_shares_sum_to_one():
    x = torch.arange(11)
    parts = pipeline.split_into_microbatches(x, -x, 4)
    assert [len(one.inputs) for one in parts] == [3, 3, 3, 2] and [one.number for one in parts] == [0, 1, 2, 3]
    assert torch.cat([one.inputs for one in parts]).equal(x) and torch.cat([one.targets for one in parts]).equal(-x)
    assert sum(one.share for one in parts) == pytest.approx(1) and parts[3].share == 2 / 11


# ---- what is refused -------------------------------------------------------------------------------------------------------


def test_both_send_first_is_a_deadlock():
    def program():
        rank, p = dist.get_rank(), dist.get_world_size()
        stage = pipeline.cut_into_stages(model_of(), p)[rank]
        plain = dist.isend

        def blocking(*args, **kwargs):
            plain(*args, **kwargs).wait()

        dist.isend = blocking
        pipeline.one_f_one_b_step(stage, batch(0, 4, 4), next_token_loss)

    with pytest.raises(Deadlock, match="(?s)rank 0 waits in .*send.*rank 1 waits in .*send"):
        run(program, ranks=2)


def test_bad_input_is_refused_by_a_sentence():
    model, x = model_of(), torch.zeros(4, 2)
    for call, words in (
        (
            lambda: pipeline.cut_into_stages(nn.Linear(2, 2), 2),
            "not a Linear without embedding. Of any other model make the stages",
        ),
        (lambda: pipeline.cut_into_stages(None, 2), "not a NoneType"),
        (lambda: pipeline.cut_into_stages(model, 0), "stages is 0, but must be a whole number from 1"),
        (lambda: pipeline.cut_into_stages(model, True), "stages must be a whole number"),
        (lambda: pipeline.cut_into_stages(model, 9), "8 layers cannot fill 9 stages: take at most 8"),
        (lambda: pipeline.cut_into_stages(model, 2, [4, 5]), "are 9 layers in all, but the model has 8"),
        (lambda: pipeline.cut_into_stages(model, 3, [4, 4]), "layers must be a list of 3 numbers"),
        (lambda: pipeline.cut_into_stages(model, 3, [4, 0, 4]), "only the first and the last stage may be without layers"),
        (lambda: pipeline.cut_into_stages(model, 2, [9, -1]), "The number of layers of stage 0 is 9"),
        (lambda: pipeline.Stage([nn.Linear(2, 2)], 1, 2), "so it needs make_buffer"),
        (lambda: pipeline.Stage([], 2, 2, torch.empty_like), r"index \(of the stage\) is 2"),
        (lambda: pipeline.split_into_microbatches(x, x, 5), "m, the number of microbatches, is 5, but must be .* from 1 to 4"),
        (lambda: pipeline.split_into_microbatches(x, x, 0), "m, the number of microbatches, is 0"),
        (lambda: pipeline.split_into_microbatches(x, x, 1.5), "m, the number of microbatches, must be a whole number"),
        (lambda: pipeline.split_into_microbatches(x, x[:3], 2), "4 inputs and 3 targets"),
        (lambda: pipeline.split_into_microbatches(None, x, 2), "inputs must be a tensor"),
        (lambda: pipeline.split_into_microbatches(x[:0], x[:0], 1), "no samples"),
        (lambda: pipeline.ActivationMeter(), "needs the modules"),
        (lambda: pipeline.ActivationMeter(3), "needs the modules"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            call()


@pytest.mark.parametrize(
    "change,words",
    [
        ({"orders": schedules.gpipe(3, 2)}, "The orders are for 3 ranks, but there are 2"),
        ({"orders": schedules.gpipe(2, 3)}, "Rank 0 runs F2, but there are 2 microbatches"),
        ({"orders": ["F0 B0 F1 B1", "F0 F1 B1 B0"]}, "rank 0 cannot run B0 before B0 of rank 1"),
        ({"orders": None}, "Orders are a list"),
        ({"stages": None}, "stages must be this rank's Stage"),
        ({"stages": "swapped"}, "so they must be stages .0. of 2, not .1. of 2"),
        ({"microbatches": [1, 2]}, "microbatches must be a list from split_into_microbatches"),
        ({"microbatches": []}, "microbatches must be a list from split_into_microbatches"),
        ({"mean_loss": None}, "mean_loss must be a function"),
    ],
)
def test_bad_input_on_ranks_is_refused(change, words):
    def program():
        rank, p = dist.get_rank(), dist.get_world_size()
        stages = pipeline.cut_into_stages(model_of(), p)
        given = {
            "stages": stages[rank], "orders": schedules.gpipe(p, 2), "microbatches": batch(0, 4, 2), "mean_loss": next_token_loss,
        } | change  # fmt: skip
        if given["stages"] == "swapped":
            given["stages"] = stages[1 - rank]
        pipeline.run_schedule(**given)

    with pytest.raises(RankFailed, match=words):
        run(program, ranks=2)


def test_the_tied_gradient_is_missing_before_backward():
    def program():
        stages = pipeline.cut_into_stages(model_of(), 2)[dist.get_rank() :: 2]
        pipeline.sum_tied_gradients(stages, pipeline.first_and_last())

    with pytest.raises(RankFailed, match="The tied weight has no gradient yet"):
        run(program, ranks=2)


# ---- without the course ----------------------------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """import os
import sys
import torch
import torch.distributed as dist
from torch import nn
from lessons_lib.parallel import pipeline, schedules

dist.init_process_group("gloo")
rank, p = dist.get_rank(), dist.get_world_size()

def layer(index):
    torch.manual_seed(index)
    return nn.Linear(5, 5).double()

def mean_square(y, targets):
    return (y - targets).square().mean()

x = torch.arange(45, dtype=torch.float64).view(9, 5).sin()
whole = nn.Sequential(*[layer(index) for index in range(2 * p)])
expected = mean_square(whole(x), -x)
expected.backward()
m = 2 * p
for orders, v in ((schedules.gpipe(p, m), 1), (schedules.zero_bubble_h1(p, m), 1), (schedules.interleaved(p, m, 2), 2)):
    cut = 2 // v
    stages = [
        pipeline.Stage([layer(i) for i in range(index * cut, index * cut + cut)], index, p * v, torch.empty_like)
        for index in range(rank, p * v, p)
    ]
    microbatches = pipeline.split_into_microbatches(x, -x, m)
    loss = pipeline.loss_everywhere(pipeline.run_schedule(stages, orders, microbatches, mean_square))
    assert abs(loss.item() - expected.item()) < 1e-12, (loss, expected)
    for stage in stages:
        for number, part in enumerate(stage.parts):
            other = whole[stage.index * cut + number]
            assert torch.allclose(part.weight.grad, other.weight.grad) and torch.allclose(part.bias.grad, other.bias.grad)
ours = sorted(m.removeprefix("lessons_lib.") for m in sys.modules if m.startswith("lessons_lib."))
assert all(name.startswith("parallel") for name in ours), ours
with open(f"rank {rank}.txt", "w") as file:
    file.write("equal")
dist.barrier()
sys.stdout.flush()
os._exit(0)  # gloo's threads, taken down while others still use theirs, may abort a rank that is done
"""


@pytest.mark.skipif(sys.platform == "win32", reason="torchrun needs libuv, which some builds of torch for Windows lack")
def test_it_runs_under_torchrun_as_it_is(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback}
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(program)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert [(tmp_path / f"rank {rank}.txt").read_text() for rank in range(4)] == ["equal"] * 4
