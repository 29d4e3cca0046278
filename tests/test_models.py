"""The transformer against one written here with loops over heads and positions, against PyTorch's own, and against shapes.py."""

import copy
import math
import pickle
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from lessons_lib import shapes
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

SMALL = {
    "gpt": gpt(2, 24, 3, 31, 10),
    "llama": llama(2, 24, 6, 2, 20, 31, 10),
    "one key head": Shape(1, 16, 4, 31, 10, kv_heads=1, feed_forward=7, gated=True),
    "untied": Shape(2, 12, 2, 31, 10, biases=False, tied=False),
    "rotary and biases": Shape(1, 8, 1, 31, 10, norm="rms", positions="rotary"),
}
every_shape = pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
both_attentions = pytest.mark.parametrize("attention", [plain_attention, fused_attention])


def stirred(model):
    """The model with random biases and norms too, so that leaving one out shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def random_tokens(shape, batch=2, sequence=None):
    return torch.randint(shape.vocabulary, (batch, sequence or shape.length))


# ---- the independent implementation: one sequence, one head, one position at a time -------------------------------------------


def by_hand(shape, weights, tokens):
    return torch.stack([logits_of(shape, weights, row) for row in tokens])


def logits_of(shape, w, row):
    x = w["embedding.tokens.weight"][row]
    if shape.positions == "learned":
        x = x + w["embedding.positions.weight"][: len(row)]
    for n in range(shape.layers):
        own = {name.removeprefix(f"blocks.{n}."): value for name, value in w.items()}
        x = x + attend(shape, own, normed(shape, x, own, "attention_norm"))
        x = x + feed(shape, own, normed(shape, x, own, "mlp_norm"))
    x = normed(shape, x, w, "head.norm")
    return x @ (w["embedding.tokens.weight"] if shape.tied else w["head.logits.weight"]).T


def normed(shape, x, w, name):
    if shape.norm == "rms":
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"]
    x = x - x.mean(-1, keepdim=True)
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]


def linear(x, w, name):
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def attend(shape, w, x):
    d, qkv, heads = shape.hidden // shape.heads, linear(x, w, "attention.qkv"), []
    for head in range(shape.heads):
        shared = head // (shape.heads // shape.kv_heads)
        columns = [head, shape.heads + shared, shape.heads + shape.kv_heads + shared]
        q, k, v = (qkv[:, c * d : (c + 1) * d] for c in columns)
        if shape.positions == "rotary":
            q, k = turned(q), turned(k)
        rows = []
        for t in range(len(x)):
            scores = torch.stack([q[t] @ k[earlier] / math.sqrt(d) for earlier in range(t + 1)])
            share = scores.exp() / scores.exp().sum()
            rows.append(sum(share[earlier] * v[earlier] for earlier in range(t + 1)))
        heads.append(torch.stack(rows))
    return linear(torch.cat(heads, dim=1), w, "attention.out")


def turned(x):
    """Every pair as a complex number, times e^(i x angle)."""
    half = x.shape[1] // 2
    pairs = torch.complex(x[:, :half].contiguous(), x[:, half:].contiguous())
    angle = torch.tensor([[t * 10_000 ** (-2 * i / x.shape[1]) for i in range(half)] for t in range(len(x))], dtype=x.dtype)
    pairs = pairs * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([pairs.real, pairs.imag], dim=1)


def feed(shape, w, x):
    y = linear(x, w, "mlp.up")
    if shape.gated:
        gate = linear(x, w, "mlp.gate")
        return linear(gate / (1 + (-gate).exp()) * y, w, "mlp.down")
    return linear(y * (1 + torch.erf(y / math.sqrt(2))) / 2, w, "mlp.down")


@every_shape
@both_attentions
def test_logits_loss_and_gradients_equal_the_independent_implementation(shape, attention):
    model = stirred(Transformer(shape, attention=attention, dtype=torch.float64))
    tokens = random_tokens(shape, 3, 9)
    weights = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
    logits, expected = model(tokens[:, :-1]), by_hand(shape, weights, tokens[:, :-1])
    torch.testing.assert_close(logits, expected)
    right = [expected[b, t].log_softmax(-1)[tokens[b, t + 1]] for b in range(3) for t in range(8)]
    loss, wanted = next_token_loss(logits, tokens[:, 1:]), -sum(right) / 24
    torch.testing.assert_close(loss, wanted)
    loss.backward()
    wanted.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, msg=lambda m, name=name: f"{name}: {m}")
        assert parameter.grad.abs().sum() > 0


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 3), (4, 1)])
@both_attentions
def test_attention_equals_pytorchs_own_on_repeated_heads(attention, heads, kv_heads):
    q = torch.randn(2, heads, 7, 6, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, kv_heads, 7, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    repeated = [torch.cat([t[:, h // (heads // kv_heads)][:, None] for h in range(heads)], dim=1) for t in (k, v)]
    expected, y = F.scaled_dot_product_attention(q, *repeated, is_causal=True), attention(q, k, v)
    torch.testing.assert_close(y, expected)
    weight = torch.randn_like(y)
    for own, wanted in zip(torch.autograd.grad(y, (q, k, v), weight), torch.autograd.grad(expected, (q, k, v), weight)):
        torch.testing.assert_close(own, wanted)


def test_grouped_query_equals_a_full_model_with_repeated_key_and_value_heads():
    grouped = Shape(1, 24, 6, 31, 10, kv_heads=2)
    full, few = Attention(replace(grouped, kv_heads=6)), stirred(Attention(grouped))
    q, k, v = few.qkv.weight.split([24, 8, 8])
    q_bias, k_bias, v_bias = few.qkv.bias.split([24, 8, 8])
    repeat = [head // 3 * 4 + row for head in range(6) for row in range(4)]
    with torch.no_grad():
        full.qkv.weight.copy_(torch.cat([q, k[repeat], v[repeat]]))
        full.qkv.bias.copy_(torch.cat([q_bias, k_bias[repeat], v_bias[repeat]]))
        full.out.load_state_dict(few.out.state_dict())
    x = torch.randn(2, 5, 24)
    torch.testing.assert_close(full(x), few(x))


@every_shape
@both_attentions
def test_a_later_token_changes_nothing_before_it(shape, attention):
    model, tokens = stirred(Transformer(shape, attention=attention)), random_tokens(shape)
    before, at = model(tokens), shape.length // 2
    tokens[:, at] = (tokens[:, at] + 1) % shape.vocabulary
    after = model(tokens)
    torch.testing.assert_close(after[:, :at], before[:, :at], rtol=0, atol=1e-6)
    assert ((after - before)[:, at].abs().amax(-1) > 1e-3).all()


def test_rotary_scores_depend_on_distance_alone():
    q, k = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    scores = rotate(q.expand(12, 8)) @ rotate(k.expand(12, 8)).T
    for distance in range(-11, 12):
        line = scores.diagonal(distance)
        torch.testing.assert_close(line, line[:1].expand_as(line))


# ---- parameters, first values, parts --------------------------------------------------------------------------------------------


@every_shape
def test_parameters_equal_the_closed_form_part_by_part(shape):
    model = Transformer(shape)
    count = lambda module: sum(p.numel() for p in module.parameters())  # noqa: E731
    assert count(model) == shapes.total_parameters(shape)
    block, parts = model.blocks[0], shapes.layer_parameters(shape)
    found = {"attention_norm": block.attention_norm, "qkv": block.attention.qkv, "out": block.attention.out}
    found |= {"mlp_norm": block.mlp_norm, "gate": block.mlp.gate, "up": block.mlp.up, "down": block.mlp.down}
    assert {name: count(module) for name, module in found.items() if module is not None} == parts


def test_well_known_shapes_have_their_published_count_also_as_a_model():
    for shape, published in ((shapes.GPT2_SMALL, 124_439_808), (shapes.LLAMA3_70B, 70_553_706_496)):
        assert sum(p.numel() for p in Transformer(shape, device="meta").parameters()) == published
    assert 174_550e6 < sum(p.numel() for p in Transformer(shapes.GPT3_175B, device="meta").parameters()) < 174_650e6


@every_shape
def test_parts_built_alone_start_as_in_the_whole_model(shape):
    state, whole = torch.get_rng_state(), Transformer(shape, seed=5)
    last = shape.layers - 1
    pairs = [
        (Embedding(shape, seed=5), whole.embedding),
        (Block(shape, last, seed=5), whole.blocks[last]),
        (Head(shape, seed=5), whole.head),
        (Attention(shape, last, seed=5), whole.blocks[last].attention),
        (MLP(shape, last, seed=5), whole.blocks[last].mlp),
    ]
    for alone, inside in pairs:
        assert alone.state_dict().keys() == inside.state_dict().keys()
        for name, value in alone.state_dict().items():
            assert torch.equal(value, inside.state_dict()[name]), name
    assert torch.equal(torch.get_rng_state(), state), "building a model must leave the global random state alone"
    tokens = random_tokens(shape)
    chained = torch.nn.Sequential(pairs[0][0], *whole.blocks[:-1], pairs[1][0], pairs[2][0])(tokens)
    assert torch.equal(chained, whole(tokens))


def test_first_values_differ_by_seed_layer_and_matrix_and_have_gpt2s_deviation():
    shape = gpt(3, 128, 2, 300, 50)
    models = [Transformer(shape, seed=seed) for seed in (0, 1)]
    matrices = [p for m in models for p in m.parameters() if p.dim() == 2]
    starts = {tuple(p.flatten()[:5].tolist()) for p in matrices}
    assert len(starts) == len(matrices) == 2 * (2 + 4 * 3)
    for name, parameter in models[0].named_parameters():
        if parameter.dim() == 1:
            assert (parameter == (1 if "norm" in name and "weight" in name else 0)).all(), name
        else:
            expected = 0.02 / math.sqrt(6) if ".out." in name or ".down." in name else 0.02
            assert abs(parameter.std().item() / expected - 1) < 5 / math.sqrt(2 * parameter.numel()), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_another_dtype_starts_with_the_same_values_rounded(dtype):
    shape = SMALL["llama"]
    own, single = Transformer(shape, dtype=dtype), Transformer(shape)
    for a, b in zip(own.parameters(), single.parameters()):
        assert a.dtype == dtype and torch.equal(a, b.to(dtype))
    logits = own(random_tokens(shape))
    assert logits.dtype == dtype and next_token_loss(logits, random_tokens(shape)).dtype == torch.promote_types(
        dtype, torch.float32
    )


def test_a_tied_model_shares_one_weight_and_no_state_is_left_between_calls():
    tied, untied = Transformer(SMALL["gpt"]), Transformer(SMALL["untied"])
    assert tied.head.logits.weight is tied.embedding.tokens.weight
    assert untied.head.logits.weight is not untied.embedding.tokens.weight
    for model in (tied, pickle.loads(pickle.dumps(tied)), copy.deepcopy(tied), Transformer(SMALL["llama"])):
        tokens, names = torch.randint(31, (2, 6)), set(model.state_dict())
        first = model(tokens)
        model(torch.randint(31, (3, 10)))
        assert torch.equal(model(tokens), first) and set(model.state_dict()) == names
        assert not list(model.buffers())


@both_attentions
def test_dropout_drops_its_share_in_training_alone(attention):
    shape, tokens = SMALL["gpt"], torch.randint(31, (2, 10))
    model = Transformer(shape, dropout=0.4, attention=attention)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens)) and torch.equal(model(tokens), Transformer(shape, attention=attention)(tokens))
    ones = torch.ones(4, 2, 64, 1)
    mixed = torch.stack([attention(ones, ones, ones, dropout=0.25) for _ in range(20)])  # each weight is kept or 0, times 4/3
    assert abs(mixed.mean().item() - 1) < 0.05 and mixed[..., 0, 0].unique().tolist() == pytest.approx([0, 4 / 3])


def test_it_learns_a_sequence_by_heart():
    tokens = torch.randint(128, (2, 33))
    model = Transformer(shapes.TINY)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert abs(losses[0] - math.log(128)) < 0.1 and losses[-1] < 0.5
