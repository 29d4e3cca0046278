"""Modules and tensors with gradients, handed to an answer and compared with one process."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lessons_lib.checks.exercise import Exercise, Wrong
from lessons_lib.checks.gradients import differentiated, expect_gradients, expect_values, one_process, same
from lessons_lib.checks.inside import Draw, Net
from lessons_lib.checks.structure import bytes_sent, calls, expect_calls, said
from lessons_lib.checks.trial import Trial, draw, fresh, parts
from lessons_lib.checks.values import expect


def linear(inputs=4, outputs=3):
    return nn.Linear(inputs, outputs)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)


def trial(answer, *parameters):
    return Trial(Exercise("test", parameters, "99.ipynb", "easy", 5, "x", lambda trial: "", ("a", "b", "c")), answer)


def test_a_module_is_the_same_on_both_sides_and_fresh_each_time():
    net = Net(linear, fresh(), (5, 2), gradients=fresh(), without=("bias",))
    one, two = net.make(), net.make()
    assert torch.equal(one.weight, two.weight) and one.weight is not two.weight and one.bias.grad is None
    assert torch.equal(one.weight.grad, two.weight.grad) and one.weight.grad.dtype == torch.float32
    assert one.weight.round().equal(one.weight) and one.weight.abs().max() <= 9
    assert not torch.equal(Net(linear, fresh(), (5, 2)).make().weight, one.weight)
    state = net.state()
    assert state.values["weight"].tolist() == one.weight.tolist() and state.gradients["bias"] is None


def test_tied_frozen_and_buffers():
    model = Net(Tied, 1, gradients=2).make()
    assert model.second.weight is model.first.weight and model.first.bias.grad is None
    assert model.norm.num_batches_tracked.dtype == torch.int64
    names = Net(Tied, 1).state().values
    assert "norm.running_mean" in names and "second.weight" not in names


def test_making_a_module_leaves_random_numbers_alone():
    before = torch.get_rng_state().tolist()
    Net(linear, 3).make()
    assert torch.get_rng_state().tolist() == before


@pytest.mark.parametrize("shape", [(), (3,), (2, 4)])
def test_tensors_of_every_shape_with_bounds(shape):
    drawn = Draw(5, shape, "int64", largest=7, smallest=2)
    assert drawn.make().shape == shape and drawn.array().min() >= 2 and drawn.array().max() <= 7


def sum_of_products(model, x):
    """Right: model(x) summed over ranks, with gradients of every rank's own part."""

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            y = y.clone()
            dist.all_reduce(y)
            return y

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    return Sum.apply(model(x))


def inputs_of(ranks):
    return [(Net(linear, fresh()), draw(5, 4, requires_grad=True)) for _ in range(ranks)]


def expected_of(inputs, upstream):
    found = [one_process(net, x.array(), upstream=upstream.array()) for net, x in inputs]
    return sum(value for value, _, _ in found), [g for _, g, _ in found], [inputs[0] for _, _, inputs in found]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_values_and_gradients_of_a_right_answer(ranks):
    inputs, upstream = inputs_of(ranks), draw(5, 3)
    case = trial(sum_of_products, "model", "x").run(inputs, upstream=[upstream] * ranks)
    value, of_model, of_x = expected_of(inputs, upstream)
    expect(case, [value] * ranks)
    expect_gradients(case, 0, of_model)
    expect_gradients(case, 1, of_x)
    expect_calls(case, [("all_reduce", 60)], label="forward")
    expect_calls(case, [], label="backward")
    assert [bytes_sent(case.recording, rank) for rank in range(ranks)] == [2 * (ranks - 1) / ranks * 60] * ranks


def doubled(model, x):
    return sum_of_products(model, x) + 0 * model.bias.detach() + (model(x) - model(x).detach())


def detached(model, x):
    return sum_of_products(model, x).detach()


def only_weight(model, x):
    return sum_of_products(lambda x: x @ model.weight.T + model.bias.detach(), x)


def wrong_bias(model, x):
    return sum_of_products(lambda x: x @ model.weight.T + 3 * model.bias - 2 * model.bias.detach(), x)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (detached, "Rank 0: backward cannot go through what your function returned: nothing leads back from it"),
        (doubled, "This is exactly 2 times the right one."),
        (only_weight, "Rank 0: the gradient of bias should be ["),
        (only_weight, "Right there: weight. Wrong: bias."),
        (wrong_bias, "It counts the bias three times."),
    ],
)
def test_a_wrong_gradient_is_told(answer, words):
    inputs, upstream = inputs_of(2), draw(5, 3)
    case = trial(answer, "model", "x").run(inputs, upstream=[upstream] * 2)
    _, of_model, _ = expected_of(inputs, upstream)
    with pytest.raises(Wrong) as caught:
        expect_gradients(
            case, 0, of_model, lambda rank, name: [(3 * of_model[rank][name], "It counts the bias three times.")], tolerance=1e-6
        )
    assert words in str(caught.value)


def averages(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def test_gradients_that_are_given_and_changed():
    ranks = 3
    nets = [(Net(linear, 7, gradients=fresh()),) for _ in range(ranks)]
    own = [net.state().gradients for (net,) in nets]
    mean = {name: np.mean([one[name] for one in own], axis=0, dtype="float64") for name in own[0]}
    case = trial(averages, "model").run(nets)
    expect_gradients(case, 0, [mean] * ranks, tolerance=1e-6)
    for answer, words in (
        (lambda model: None, "This is what the rank has on its own"),
        (lambda model: [dist.all_reduce(p.grad) for p in model.parameters()] and None, "exactly 3 times the right one"),
    ):
        case = trial(answer, "model").run(nets)
        with pytest.raises(Wrong, match=words):
            expect_gradients(case, 0, [mean] * ranks, own=own, tolerance=1e-6)


def test_changed_parameters_are_told_or_compared():
    def step(model):
        with torch.no_grad():
            model.weight += 1

    def run(**options):
        return trial(step, "model").run([(Net(linear, 7),)] * 2, **options)

    with pytest.raises(Wrong, match="your function changed its argument `model`"):
        run()
    old = Net(linear, 7).state().values
    expect_values(run(may_change=(0,)), 0, [{"weight": old["weight"] + 1, "bias": old["bias"]}] * 2)
    with pytest.raises(Wrong, match="Rank 0: weight should be"):
        expect_values(run(may_change=(0,)), 0, [old] * 2)


def test_lists_of_tensors_are_given_and_watched():
    case = trial(lambda xs: xs[0] + xs[1], "xs").run([([draw(3), draw(3)],)] * 2)
    expect(case, [sum(one.array() for one in case.inputs[0][0])] * 2)
    with pytest.raises(Wrong, match="changed its argument `xs`"):
        trial(lambda xs: xs[1].zero_(), "xs").run([([draw(3), draw(3)],)] * 2)


@pytest.mark.parametrize(("shape", "n", "axis"), [((6, 4), 3, 0), ((4, 6), 2, 1), ((5,), 5, 0)])
def test_parts_are_equal_pieces_of_a_tensor(shape, n, axis):
    whole = draw(*shape)
    pieces = parts(whole, n, axis)
    assert all(np.array_equal(one.array(), piece) for one, piece in zip(pieces, np.split(whole.array(), n, axis)))
    assert all(one.make().is_contiguous() and one.make().requires_grad for one in pieces)


def test_a_function_is_differentiated_on_one_process():
    x, w, up = (draw(*shape, largest=9).array() for shape in ((3, 4), (2, 4), (3, 2)))
    value, (of_x, of_w) = differentiated(lambda x, w: x @ w.T, x, w, upstream=up)
    assert np.array_equal(value, x @ w.T) and np.array_equal(of_x, up @ w) and np.array_equal(of_w, up.T @ x)
    value, (of_x, of_index) = differentiated(lambda x, i: x[i].sum(), x, np.array([2]))
    assert value == x[2].sum() and of_index is None and of_x.tolist() == [[0] * 4, [0] * 4, [1] * 4]


class KeepsAnAttribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.copies = [x.clone(), x.clone()]  # no hook sees these
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


@pytest.mark.parametrize(
    ("answer", "nbytes"),
    [
        (lambda x, w: x @ w, 0),  # both are arguments
        (lambda x, w: torch.relu(x @ w), 24),  # its own output, 3 x 2
        (lambda x, w: (x @ w).exp() * 2, 24),
        (lambda x, w: (2 * x) @ w, 48),
        (lambda x, w: torch.relu((2 * x).relu() @ w), 48 + 24),
        (lambda x, w: KeepsAnAttribute.apply(x) @ w, 3 * 48),  # two copies, and the product's left side
        (lambda x, w: (x @ w).detach(), 0),
    ],
)
def test_what_autograd_keeps_is_counted(answer, nbytes):
    inputs = [(draw(3, 4, requires_grad=True), draw(4, 2, requires_grad=True))]
    assert trial(answer, "x", "w").run(inputs, upstream=[draw(3, 2)]).returned[0].kept == nbytes


def test_a_tolerance_is_relative_to_the_largest_and_no_number_is_like_nan():
    a = np.array([1.0, 1000.0])
    assert same(a + 0.5e-2, a, 1e-5) and not same(a + 2e-2, a, 1e-5) and not same(a + 1e-9, a)
    assert not same(np.array([np.nan, 1000.0]), a, 1e-5)


def test_calls_are_said():
    assert said([]) == "no collective"
    few = [("all_reduce", 40), ("all_reduce", 8), ("all_gather", 1000)]
    assert said(few) == "all_reduce twice (40, 8 bytes), all_gather (1,000 bytes)"
    many = [("all_reduce", 1000)] * 3 + [("broadcast", size) for size in range(5)]
    assert said(many) == "all_reduce 3 times (1,000 bytes each), broadcast 5 times (10 bytes in all)"
    case = trial(lambda x: dist.all_reduce(x) or x, "x").run([(draw(5),)] * 2, may_change=(0,))
    assert calls(case.recording, 1) == [("all_reduce", 20)]
    with pytest.raises(Wrong, match=r"rank 0 called all_reduce \(20 bytes\); expected was no collective"):
        expect_calls(case, [])
