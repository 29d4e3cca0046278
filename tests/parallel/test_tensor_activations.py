"""What a block keeps for backward, by hooks on real ranks, is what the formula says, to the byte."""

import itertools

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from lessons_lib import activations, models, run, shapes  # noqa: E402
from lessons_lib.parallel import tensor  # noqa: E402
from lessons_lib.parallel.saved import saved_bytes  # noqa: E402

GPT = shapes.gpt(2, 64, 8, 32, 16)
GROUPED = shapes.llama(2, 64, 8, 4, 96, 32, 16)
LLAMA = shapes.llama(2, 64, 8, 8, 96, 32, 16)
MIXED = shapes.Shape(2, 64, 8, 32, 16, feed_forward=40, gated=True, positions="rotary")  # LayerNorm and biases, gated, rotary
LEARNED = shapes.Shape(2, 64, 8, 32, 16, kv_heads=4, norm="rms")  # grouped heads that are not turned: queries stay views of qkv
SINGLE = shapes.gpt(2, 32, 1, 32, 16)
SHAPES = {"gpt": GPT, "grouped": GROUPED, "llama": LLAMA, "mixed": MIXED, "learned": LEARNED, "one head": SINGLE}
DTYPES = (torch.float32, torch.bfloat16)


def by_hooks(shape, batch, sequence, sequence_parallel, dropout, fused, dtype):
    how = models.fused_attention if fused else models.plain_attention
    block = models.Block(shape, dropout=dropout, attention=how, dtype=dtype)
    split = tensor.ParallelBlock(block, sequence_parallel=sequence_parallel, random=tensor.RandomStates(0))
    part = sequence // dist.get_world_size() if sequence_parallel else sequence
    return saved_bytes(split, torch.zeros(batch, part, shape.hidden, dtype=dtype, requires_grad=True))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_formula_is_exact_to_the_byte(ranks, name):
    shape = SHAPES[name]
    if shape.kv_heads % ranks:
        pytest.skip("each rank needs a whole key and value head")
    every = itertools.product((1, 2), (1, 16), (False, True), (0.0, 0.1), (False, True), DTYPES)
    cases = [case for case in every if not case[2] or case[1] % ranks == 0]

    def program():
        return [by_hooks(shape, *case) for case in cases]

    expected = [
        sum(
            activations.kept(
                shape, b, s, ranks, sequence_parallel=sp, dropout=p, fused=fused, bytes_each=dtype.itemsize
            ).values()
        )
        for b, s, sp, p, fused, dtype in cases
    ]  # fmt: skip
    assert len(set(expected)) >= 24  # they differ: no formula would fit by being constant
    for found in run(program, ranks=ranks).results:
        assert dict(zip(cases, found)) == dict(zip(cases, expected))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("shape, tokens", [(shapes.GPT3_175B, 2048), (shapes.LLAMA3_70B, 8192)], ids=["GPT-3", "Llama-3"])
def test_at_real_size_without_data(shape, tokens, fused):
    for sp, p in ((False, 0.0), (True, 0.1)):
        found = run(by_hooks, shape, 1, tokens, sp, p, fused, torch.bfloat16, ranks=8, shapes_only=True, alike=True).results[0]
        parts = activations.kept(shape, 1, tokens, 8, sequence_parallel=sp, dropout=p, fused=fused, bytes_each=2)
        assert found == sum(parts.values())


@pytest.mark.parametrize("shape", [GPT, LLAMA])
def test_the_plain_block_of_one_process_keeps_as_much_as_one_rank(shape):
    def program():
        x = torch.zeros(2, 8, 64, requires_grad=True)
        block = models.Block(shape)
        return saved_bytes(block, x), saved_bytes(tensor.ParallelBlock(block), x)

    plain, split = run(program, ranks=1).results[0]
    assert plain == split == sum(activations.kept(shape, 2, 8).values())


def test_views_count_once_parameters_not_at_all_and_without_gradients_nothing():
    x = torch.zeros(10, 4, requires_grad=True)
    square = torch.nn.Module()
    square.forward = lambda x: x[:5] * x[5:] * x[:5]  # views of x, and one product
    assert saved_bytes(square, x) == 160 + 80
    layer = torch.nn.Linear(4, 6)
    assert saved_bytes(layer, x) == 160
    with torch.no_grad():
        assert saved_bytes(layer, x) == 0


def test_wrong_values_are_refused_in_a_sentence():
    layer, x = torch.nn.Linear(4, 6), torch.zeros(2, 4)
    for wrong in (None, 3, torch.nn.Linear, x):
        with pytest.raises(TypeError, match="module must be an nn.Module, not "):
            saved_bytes(wrong, x)
    for wrong in (None, 3, [1.0], "x"):
        with pytest.raises(TypeError, match="x must be a tensor, not "):
            saved_bytes(layer, wrong)
