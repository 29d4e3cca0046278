"""Parameters and FLOPs of the shapes against published totals and the papers' own formulas; what a shape refuses."""

import random
from dataclasses import FrozenInstanceError, replace

import pytest

from lessons_lib import shapes
from lessons_lib.shapes import Shape, find, gpt, llama, total_parameters


# Exact counts of the released checkpoints, as Hugging Face's num_parameters() gives them.
@pytest.mark.parametrize(
    ("shape", "count"),
    [
        (shapes.GPT2_SMALL, 124_439_808),
        (shapes.LLAMA2_7B, 6_738_415_616),
        (shapes.LLAMA3_8B, 8_030_261_248),
        (shapes.LLAMA3_70B, 70_553_706_496),
    ],
    ids=lambda v: getattr(v, "name", ""),
)
def test_counts_equal_the_released_checkpoints(shape, count):
    assert total_parameters(shape) == count


# arXiv:2005.14165, table D.1, in millions and rounded there to the digits that are given here.
@pytest.mark.parametrize(
    ("shape", "millions", "step"),
    [(shapes.GPT3_1_3B, 1_320, 10), (shapes.GPT3_6_7B, 6_660, 10), (shapes.GPT3_13B, 12_850, 10), (shapes.GPT3_175B, 174_600, 100)],
    ids=lambda v: getattr(v, "name", ""),
)
def test_counts_equal_gpt3_within_its_rounding(shape, millions, step):
    assert abs(total_parameters(shape) / 1e6 - millions) <= step / 2


@pytest.mark.parametrize("shape", shapes.MEGATRON, ids=lambda s: s.name)
def test_counts_equal_megatron_table_1_within_its_rounding(shape):
    billions = float(shape.name.removeprefix("Megatron ").removesuffix("B"))
    assert abs(total_parameters(shape) / 1e9 - billions) <= (0.05 if billions < 1000 else 0.5)


def random_shapes(count=20):
    rng = random.Random()
    for _ in range(count):
        heads = rng.randint(1, 9)
        hidden, layers = heads * 2 * rng.randint(1, 20), rng.randint(1, 7)
        sizes = dict(layers=layers, hidden=hidden, heads=heads, vocabulary=rng.randint(1, 999), length=rng.randint(1, 200))
        kv_heads = rng.choice([k for k in range(1, heads + 1) if heads % k == 0])
        yield gpt(**sizes), llama(**sizes, kv_heads=kv_heads, feed_forward=rng.randint(1, 300))


def test_a_gpt_has_the_parameters_of_the_megatron_formula():
    """12 l h^2 (1 + 13/(12h) + (V + s)/(12 l h)), eq. 2 of arXiv:2104.04473, which leaves out the final norm's 2h."""
    for shape, _ in random_shapes():
        l, h, v, s = shape.layers, shape.hidden, shape.vocabulary, shape.length  # noqa: E741
        assert total_parameters(shape) == 12 * l * h * h + 13 * l * h + (v + s) * h + 2 * h
        assert sum(shapes.layer_weights(shape).values()) == 12 * h * h


def test_a_llama_has_the_parameters_counted_by_hand():
    for _, shape in random_shapes():
        h, d = shape.hidden, shape.hidden // shape.heads
        queries, keys, mlp = h * shape.heads * d, h * shape.kv_heads * d, 3 * h * shape.feed_forward
        layer = 2 * h + queries + 2 * keys + shape.heads * d * h + mlp
        assert sum(shapes.layer_parameters(shape).values()) == layer
        assert total_parameters(shape) == shape.layers * layer + h + 2 * shape.vocabulary * h


def test_flops_equal_the_megatron_formula():
    """96 B s l h^2 (1 + s/(6h) + V/(16 l h)), eq. 3 of arXiv:2104.04473: four passes over the layers (forward, forward again,
    backward, which counts twice), three over the logits. Here for one token, times 3 to stay whole."""
    for shape, _ in random_shapes():
        l, h, v, s = shape.layers, shape.hidden, shape.vocabulary, random.randint(1, shape.length)  # noqa: E741
        recomputed = 4 * l * sum(shapes.layer_flops(shape, s).values()) + 3 * shapes.logits_flops(shape)
        assert recomputed == 96 * l * h * h + 16 * l * h * s + 6 * h * v
        assert shapes.training_flops(shape, s) == 3 * shapes.forward_flops(shape, s) == 72 * l * h * h + 12 * l * h * s + 6 * h * v


def test_flops_of_a_llama_are_2_for_each_weight_and_attention_of_all_query_heads():
    """2 N + 4 l s h, appendix B of arXiv:2204.02311, N being the weights of matrices; fewer kv_heads save none of the 4 l s h."""
    for _, shape in random_shapes():
        s, h = random.randint(1, shape.length), shape.hidden
        norms = h * (2 * shape.layers + 1)
        in_matrices = total_parameters(shape) - norms - shape.vocabulary * h  # the embedding is looked up
        assert shapes.forward_flops(shape, s) == 2 * in_matrices + 4 * shape.layers * s * h


def test_bytes_of_weights_and_of_the_kv_cache():
    assert shapes.parameter_bytes(shapes.GPT3_175B) == 2 * 174_604_259_328
    assert shapes.parameter_bytes(shapes.GPT2_SMALL, 16) == 16 * 124_439_808
    # 0.5 MiB a token for Llama-2 7B in 16 bits; a quarter of it for Llama-3 8B, with 8 of 32 heads
    assert shapes.kv_cache_bytes(shapes.LLAMA2_7B, 1) == 2**19
    assert shapes.kv_cache_bytes(shapes.LLAMA3_8B, 10) == 10 * 2**17
    assert shapes.kv_cache_bytes(shapes.LLAMA3_8B, 10, 1) == 10 * 2**16


def test_a_shape_fills_in_what_follows_and_is_frozen():
    shape = Shape(2, 48, 6, 100, 32)
    assert (shape.kv_heads, shape.feed_forward, shape.head_size, shape.qkv) == (6, 192, 8, 144)
    assert replace(shape, kv_heads=2).qkv == 80
    assert shape.title == "a transformer: 2 layers, hidden 48, 6 heads, 62,976 parameters"
    assert shapes.LLAMA3_8B.title == (
        "Llama-3 8B: 32 layers, hidden 4,096, 32 heads (8 for keys and values), 8.0 billion parameters"
    )
    with pytest.raises(FrozenInstanceError):
        shape.layers = 3


def test_every_shape_of_the_catalogue_has_a_source_and_is_found_by_its_name():
    assert len({shape.name for shape in shapes.SHAPES}) == len(shapes.SHAPES)
    for shape in shapes.SHAPES:
        assert shape.source and find(f" {shape.name.upper()} ") is shape
    for wrong in ("GPT-5", "", None, 3):
        with pytest.raises(ValueError, match="no shape named .* These are known: tiny, .*Llama-3 8B"):
            find(wrong)


@pytest.mark.parametrize("what", ["layers", "hidden", "heads", "vocabulary", "length", "kv_heads", "feed_forward"])
@pytest.mark.parametrize("bad", [0, -4, 10**9, 10**30, 2.0, float("nan"), float("inf"), True, "8", [], ()])
def test_sizes_must_be_positive_whole_numbers(what, bad):
    with pytest.raises((TypeError, ValueError), match=rf"^{what} of tiny (is|must be) .*whole number from 1 to 1?\d0,") as error:
        replace(shapes.TINY, **{what: bad})
    assert repr(bad) in str(error.value) or "far too large" in str(error.value) or f"{bad:,}" in str(error.value)


@pytest.mark.parametrize("what", ["layers", "hidden", "heads", "vocabulary", "length"])
def test_none_is_no_size(what):
    with pytest.raises(TypeError, match=f"^{what} of tiny must be a whole number from 1 to .* not None"):
        replace(shapes.TINY, **{what: None})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (dict(heads=5), "5 heads do not divide the hidden width 64 of tiny: .*Take a number of heads that divides 64"),
        (dict(kv_heads=3), "3 kv_heads do not divide the 4 heads of tiny: .*Take a number of kv_heads that divides 4"),
        (dict(kv_heads=8), "8 kv_heads do not divide the 4 heads of tiny"),
        (dict(heads=64, kv_heads=1, positions="rotary"), "A head of tiny is 1 wide, which is odd; .*Take an even head size"),
        (dict(norm="batch"), "norm of tiny must be 'layer' or 'rms', not 'batch'"),
        (dict(norm=None), "norm of tiny must be 'layer' or 'rms', not None"),
        (dict(positions=["rotary"]), "positions of tiny must be 'learned' or 'rotary', not"),
        (dict(gated=1), "gated of tiny must be True or False, not 1"),
        (dict(biases=None), "biases of tiny must be True or False, not None"),
        (dict(tied="yes"), "tied of tiny must be True or False, not 'yes'"),
        (dict(name=None), "The name of a shape must be text such as 'GPT-3 175B', not None"),
    ],
)
def test_impossible_shapes_are_refused_by_a_sentence(change, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        replace(shapes.TINY, **change)


COUNTS = [
    shapes.layer_weights, shapes.layer_parameters, shapes.parameters, shapes.total_parameters, shapes.parameter_bytes,
    shapes.logits_flops, lambda s: shapes.kv_cache_bytes(s, 1), lambda s: shapes.layer_flops(s, 1),
    lambda s: shapes.forward_flops(s, 1), lambda s: shapes.training_flops(s, 1),
]  # fmt: skip


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("bad", [None, "GPT-3 175B", 7, True, {}])
def test_counting_needs_a_shape(count, bad):
    with pytest.raises(TypeError, match="A shape is needed, such as shapes.GPT3_175B"):
        count(bad)


@pytest.mark.parametrize("bad", [0, -1, 2.5, float("nan"), True, None, "2", 10**13])
def test_counts_need_whole_numbers(bad):
    for count in (shapes.layer_flops, shapes.forward_flops, shapes.training_flops):
        with pytest.raises((TypeError, ValueError), match=r"^sequence \(tokens in a sequence\)"):
            count(shapes.TINY, bad)
    with pytest.raises((TypeError, ValueError), match="^bytes_each"):
        shapes.parameter_bytes(shapes.TINY, bad)
    with pytest.raises((TypeError, ValueError), match="^tokens"):
        shapes.kv_cache_bytes(shapes.TINY, bad)


def test_a_sequence_longer_than_the_model_takes_is_refused():
    with pytest.raises(ValueError, match="A sequence of 65 tokens is longer than tiny allows: 64. Take a shorter one"):
        shapes.layer_flops(shapes.TINY, 65)
