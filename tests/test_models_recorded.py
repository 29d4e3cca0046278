"""The transformer under the recorder: FLOPs as the closed form, real sizes without data, and what its modules refuse."""

from dataclasses import replace

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from lessons_lib import run, shapes
from lessons_lib.models import (
    MLP,
    Attention,
    Block,
    Embedding,
    Head,
    Transformer,
    fused_attention,
    next_token_loss,
    plain_attention,
    rotate,
)  # fmt: skip
from lessons_lib.shapes import Shape, gpt, llama

both_attentions = pytest.mark.parametrize("attention", [plain_attention, fused_attention])


def train_once(shape, batch, sequence, attention, backward):
    model = Transformer(shape, attention=attention)
    tokens = torch.zeros(batch, sequence + 1, dtype=torch.int64)
    loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
    if backward:
        loss.backward()


@pytest.mark.parametrize("shapes_only", [False, True])
@pytest.mark.parametrize(
    "shape",
    [gpt(2, 24, 3, 31, 16), llama(3, 24, 6, 2, 20, 31, 16), Shape(1, 16, 4, 31, 16, kv_heads=1, tied=False)],
    ids=["gpt", "llama", "one key head"],
)
def test_recorded_flops_equal_the_closed_form(shape, shapes_only):
    for batch, sequence in ((1, 16), (3, 5)):
        tokens = batch * sequence
        for attention in (plain_attention, fused_attention):
            recording = run(train_once, shape, batch, sequence, attention, False, ranks=1, shapes_only=shapes_only)
            assert recording.flops == [tokens * shapes.forward_flops(shape, sequence)]
        recording = run(train_once, shape, batch, sequence, plain_attention, True, ranks=1, shapes_only=shapes_only)
        assert recording.flops == [tokens * shapes.training_flops(shape, sequence)]
        # the fused backward computes the scores again: five products in place of four
        recording = run(train_once, shape, batch, sequence, fused_attention, True, ranks=1, shapes_only=shapes_only)
        again = tokens * shape.layers * shapes.layer_flops(shape, sequence)["scores"]
        assert recording.flops == [tokens * shapes.training_flops(shape, sequence) + again]


def build(shape):
    Transformer(shape)


@pytest.mark.parametrize("shapes_only", [False, True])
def test_building_a_model_is_not_part_of_the_recording(shapes_only):
    for shape in (shapes.TINY, shapes.TINY_LLAMA):
        recording = run(build, shape, ranks=2, shapes_only=shapes_only)
        assert sum(o.nbytes for o in recording.operators) == 0


def one_block(shape, attention):
    block = Block(shape, shape.layers - 1, dtype=torch.bfloat16, attention=attention)
    x = torch.zeros(1, shape.length, shape.hidden, dtype=torch.bfloat16, requires_grad=True)
    y = block(x)
    y.backward(torch.zeros_like(y))
    return y.shape, sum(p.numel() for p in block.parameters())


@pytest.mark.parametrize("shape", [shapes.GPT3_175B, shapes.LLAMA3_8B, shapes.LLAMA3_70B], ids=lambda s: s.name)
@both_attentions
def test_a_block_of_real_size_is_recorded_without_data(shape, attention):
    """On 2 ranks at most two of 3.6 GB blocks would be in memory here, had they data."""
    recording = run(one_block, shape, attention, ranks=2, shapes_only=True)
    parts = shapes.layer_flops(shape, shape.length)
    passes = 3 * sum(parts.values()) + (parts["scores"] if attention is fused_attention else 0)
    assert recording.flops == [shape.length * passes] * 2
    assert recording.results == [((1, shape.length, shape.hidden), sum(shapes.layer_parameters(shape).values()))] * 2


def averaged(shape, tokens):
    rank = torch.distributed.get_rank()
    model = DistributedDataParallel(Transformer(shape, seed=rank))  # DDP makes all equal to rank 0
    mine = tokens[rank::2]
    next_token_loss(model(mine[:, :-1]), mine[:, 1:]).backward()
    return {name: p.grad for name, p in model.module.named_parameters()}


def test_pytorchs_data_parallel_takes_it_as_it_is():
    shape, tokens = gpt(2, 16, 2, 31, 8), torch.randint(31, (4, 9))
    model = Transformer(shape)
    next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
    for gradients in run(averaged, shape, tokens, ranks=2).results:
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, msg=lambda m, name=name: f"{name}: {m}")


# ---- what is refused ------------------------------------------------------------------------------------------

TINY = shapes.TINY


@pytest.mark.parametrize("module", [Transformer, Embedding, Block, Head, Attention, MLP])
@pytest.mark.parametrize("bad", [None, "tiny", 4, True])
def test_a_module_needs_a_shape(module, bad):
    with pytest.raises(TypeError, match="A shape is needed, such as shapes.TINY, not"):
        module(bad)


@pytest.mark.parametrize("module", [Transformer, Embedding, Block, Head, Attention, MLP])
@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (dict(dtype=torch.int64), "dtype must be a floating-point type such as torch.float32 .*, not torch.int64"),
        (dict(dtype="bfloat16"), "dtype must be .*, not 'bfloat16'"),
        (dict(dtype=None), "dtype must be .*, not None"),
        (dict(device="gpu"), "device must be one that PyTorch knows, such as 'cpu', .*, not 'gpu'"),
        (dict(device=1.5), "device must be one that PyTorch knows, .*, not 1.5"),
        (dict(device=None), "device must be one that PyTorch knows, .*, not None"),
        (dict(seed=1.0), "seed must be a whole number, not 1.0"),
        (dict(seed=True), "seed must be a whole number, not True"),
        (dict(seeed=1), "seeed is not known here: a module takes dtype, device and seed"),
    ],
)
def test_modules_refuse_wrong_settings(module, wrong, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        module(TINY, **wrong)


@pytest.mark.parametrize("bad", [1, 1.5, -0.1, float("nan"), float("inf"), True, None, "0.1"])
def test_dropout_is_a_share_below_one(bad):
    x = torch.ones(1, 1, 2, 2)
    for make in (Transformer, Embedding, Block, Attention, MLP):
        with pytest.raises(ValueError, match="dropout must be a number from 0 up to, but not including, 1 .*, not"):
            make(TINY, dropout=bad)
    for attention in (plain_attention, fused_attention):
        with pytest.raises(ValueError, match="dropout must be a number from 0"):
            attention(x, x, x, bad)


@pytest.mark.parametrize("bad", [-1, 4, 10**30, 0.0, float("nan"), True, None, "1"])
def test_layer_counts_from_0_to_below_the_layers(bad):
    for module in (Block, Attention, MLP):
        with pytest.raises(ValueError, match=r"layer must be a whole number from 0 to 3 \(the shape has 4 layers\), not"):
            module(TINY, bad)


def test_attention_must_be_a_function():
    for module in (Transformer, Block, Attention):
        with pytest.raises(TypeError, match="attention must be a function such as plain_attention or fused_attention, not 'flash'"):
            module(TINY, attention="flash")


@pytest.mark.parametrize(
    ("tokens", "sentence"),
    [
        (torch.zeros(2, 65, dtype=torch.int64), "The sequence has 65 tokens; this model takes 1 to 64"),
        (torch.zeros(2, 0, dtype=torch.int64), "The sequence has 0 tokens"),
        (torch.zeros(8, dtype=torch.int64), r"tokens must be .*\(batch, sequence\), not a torch.int64 tensor of \(8,\)"),
        (torch.zeros(2, 8), "tokens must be whole numbers, .* not a torch.float32 tensor"),
        (torch.full((2, 8), 128), "tokens holds a number that is not a token: the vocabulary has 128, 0 to 127"),
        (torch.full((2, 8), -1), "tokens holds a number that is not a token"),
        ([[1, 2]], r"tokens must be .* not \[\[1, 2\]\] \(a list\)"),
        (None, "tokens must be .* not None"),
    ],
    ids=str,
)
def test_tokens_that_do_not_fit_are_refused(tokens, sentence):
    with pytest.raises((TypeError, ValueError, IndexError), match=sentence):
        Transformer(TINY)(tokens)


@pytest.mark.parametrize("module", [Block, Head, Attention, MLP])
@pytest.mark.parametrize(
    "bad", [None, 3.0, torch.ones(2, 64), torch.ones(1, 2, 32), torch.ones(1, 2, 64, dtype=torch.int64)], ids=str
)
def test_parts_take_the_residual_stream(module, bad):
    with pytest.raises(TypeError, match=r"x must be a floating-point tensor of \(batch, sequence, hidden = 64\), not"):
        module(TINY)(bad)


@both_attentions
def test_attention_needs_heads_that_fit(attention):
    q = torch.ones(2, 4, 5, 6)
    for bad in (None, torch.ones(2, 4, 6), [q]):
        with pytest.raises(TypeError, match=r"q, k and v must be tensors of \(batch, heads, sequence, head_size\), not"):
            attention(q, q, bad)
    for heads, sequence in ((3, 5), (8, 5), (0, 5), (4, 4)):
        other = torch.ones(2, heads, sequence, 6)
        with pytest.raises(ValueError, match="do not fit: k and v must be alike"):
            attention(q, other, other)


def test_loss_and_rotation_refuse_what_does_not_fit():
    logits, targets = torch.zeros(2, 3, 7), torch.zeros(2, 3, dtype=torch.int64)
    for bad in (None, torch.zeros(2, 7), logits.long()):
        with pytest.raises(TypeError, match=r"logits must be a tensor of \(batch, sequence, vocabulary\)"):
            next_token_loss(bad, targets)
    for bad in (None, targets.float(), 3):
        with pytest.raises(TypeError, match="targets must be a torch.int64 tensor of tokens"):
            next_token_loss(logits, bad)
    with pytest.raises(ValueError, match=r"targets \(2, 4\) must hold one token for each of the logits \(2, 3, 7\)"):
        next_token_loss(logits, torch.zeros(2, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="at least one"):
        next_token_loss(logits[:0], targets[:0])
    for bad in (torch.ones(4), torch.ones(2, 3), torch.ones(2, 4, dtype=torch.int64), None):
        with pytest.raises(TypeError, match="with an even head_size, not"):
            rotate(bad)


def test_a_longer_model_is_one_replace_away():
    longer = replace(TINY, length=65)
    assert Transformer(longer)(torch.zeros(1, 65, dtype=torch.int64)).shape == (1, 65, 128)
