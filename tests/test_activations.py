"""Activation memory: the published formulas as published, and what the function refuses. No torch needed."""

import dataclasses
import math
import random

import pytest

from lessons_lib import activations, shapes
from lessons_lib.activations import PARTS, kept, published

GPTS = (shapes.GPT3_175B, shapes.MEGATRON[-1], shapes.MEGATRON[3], shapes.TINY)


def total(parts):
    assert tuple(parts) == PARTS and all(n >= 0 and n == int(n) for n in parts.values())
    return sum(parts.values())


@pytest.mark.parametrize("seed", range(20))
def test_published_are_the_formulas_of_the_paper(seed):
    """arXiv:2205.05198: equations 1, 2 and 4, and table 2, in bytes."""
    draw = random.Random(seed)
    shape = draw.choice(GPTS)
    t = draw.choice([t for t in (1, 2, 4, 8, 16) if shape.heads % t == 0])
    b, s = draw.randint(1, 8), draw.choice([64, 48, 16])
    a, h = shape.heads, shape.hidden
    sbh, scores = s * b * h, 5 * a * s / h
    assert total(published(shape, b, s)) == pytest.approx(sbh * (34 + scores), rel=1e-12)
    assert total(published(shape, b, s, t)) == pytest.approx(sbh * (10 + 24 / t + scores / t), rel=1e-12)
    assert total(published(shape, b, s, t, sequence_parallel=True)) == pytest.approx(sbh / t * (34 + scores), rel=1e-12)
    for selective in ({"recompute": "selective"}, {"fused": True}):
        assert total(published(shape, b, s, t, sequence_parallel=True, **selective)) == pytest.approx(34 * sbh / t, rel=1e-12)
        assert total(published(shape, b, s, t, **selective)) == pytest.approx(sbh * (10 + 24 / t), rel=1e-12)
    assert total(published(shape, b, s, t, recompute="full")) == 2 * sbh


def test_gpt3_as_the_paper_says():
    """Section 4.1.1: for GPT-3, 5as/h is 80; section 5: selective recomputation saves 70% of its activations."""
    shape = shapes.GPT3_175B
    assert 5 * shape.heads * 2048 / shape.hidden == 80
    all_of_it, less = (total(published(shape, 1, 2048, 8, sequence_parallel=True, recompute=r)) for r in ("none", "selective"))
    assert round(1 - less / all_of_it, 2) == 0.70
    assert total(published(shape, 1, 2048, 1)) == 2_868_903_936
    assert total(published(shape, 1, 2048, 8)) == 578_813_952
    assert total(published(shape, 1, 2048, 8, sequence_parallel=True)) == 358_612_992


@pytest.mark.parametrize(
    "ranks, sequence_parallel, without, with_dropout",
    [(1, False, 1_610_629_120, 3_321_905_152), (8, False, 377_503_744, 679_493_632), (8, True, 289_409_024, 503_318_528)],
)
def test_a_block_of_gpt3_keeps_what_was_measured(ranks, sequence_parallel, without, with_dropout):
    """b=1, s=2048, bfloat16, attention written out: measured by hooks, before this formula was written."""
    options = {"sequence_parallel": sequence_parallel, "bytes_each": 2}
    assert total(kept(shapes.GPT3_175B, 1, 2048, ranks, **options)) == without
    assert total(kept(shapes.GPT3_175B, 1, 2048, ranks, dropout=0.1, **options)) == with_dropout


def test_where_the_block_and_the_paper_differ_and_where_not():
    """By part, in bytes: masks of 2 bytes instead of 1, the gathered input, the statistics of the norms. Nothing else."""
    shape, s, t = shapes.GPT3_175B, 2048, 8
    ours = kept(shape, 1, s, t, sequence_parallel=True, dropout=0.1, bytes_each=2)
    paper = published(shape, 1, s, t, sequence_parallel=True)
    sbh, scores = s * shape.hidden, shape.heads * s * s
    assert {part: ours[part] - paper[part] for part in PARTS if ours[part] != paper[part]} == {
        "statistics of the norms": 2 * 2 * 2 * s / t,
        "inputs of qkv and up": 4 * sbh - 4 * sbh / t,
        "dropout of attention weights": scores / t,
        "dropout masks": 2 * sbh / t,
    }


def test_fused_attention_keeps_no_weights():
    shape, s = shapes.GPT3_175B, 2048
    written, fused = (kept(shape, 1, s, 8, fused=fused, bytes_each=2) for fused in (False, True))
    assert written["attention weights"] == 2 * 96 // 8 * s * s and fused["attention weights"] == 4 * 96 // 8 * s
    assert {part for part in PARTS if written[part] != fused[part]} == {"attention weights"}


@pytest.mark.parametrize("function", [kept, published])
def test_wrong_values_are_refused_in_a_sentence(function):
    good, grouped = shapes.TINY, dataclasses.replace(shapes.TINY, kv_heads=2)
    for wrong in (None, 3, "GPT-3 175B", [], shapes):
        with pytest.raises(TypeError, match="A shape is needed, such as shapes.GPT3_175B, not "):
            function(wrong, 1, 8)
    for wrong in (0, -1, 10**12):
        with pytest.raises(ValueError, match="must be a whole number from 1 to"):
            function(good, wrong, 8)
    for wrong in (None, 1.5, True, "1", math.nan, math.inf, []):
        for place in range(3):
            values = [1, 8, 1]
            values[place] = wrong
            with pytest.raises(TypeError, match="must be a whole number from 1 to"):
                function(good, *values)
    with pytest.raises(ValueError, match="sequence .* 65, but .* from 1 to 64: tiny takes no longer ones"):
        function(good, 1, 65)
    with pytest.raises(ValueError, match="3 ranks cannot share the 4 heads equally: 4 / 3 leaves 1 over"):
        function(good, 1, 8, 3)
    with pytest.raises(ValueError, match="4 ranks cannot share the 2 kv_heads equally"):
        function(grouped, 1, 8, 4)
    with pytest.raises(ValueError, match="2 ranks cannot share the 7 tokens of the sequence equally"):
        function(good, 1, 7, 2, sequence_parallel=True)
    for flag in ("sequence_parallel", "fused"):
        with pytest.raises(TypeError, match=f"{flag} must be True or False, not 1"):
            function(good, 1, 8, **{flag: 1})


def test_wrong_values_of_one_function_alone():
    for wrong in (-0.1, 1, 1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="dropout .*a number from 0 up to, but not including, 1"):
            kept(shapes.TINY, 1, 8, dropout=wrong)
    for wrong in (None, True, "0.1"):
        with pytest.raises(TypeError, match="dropout must be a number from 0"):
            kept(shapes.TINY, 1, 8, dropout=wrong)
    for wrong in (0, 1, 8, True, None, "2", 2.5, [2]):
        with pytest.raises(ValueError, match=r"bytes_each must be 4 \(float32\) or 2 \(bfloat16\), not"):
            kept(shapes.TINY, 1, 8, bytes_each=wrong)
    for wrong in (None, "some", True, []):
        with pytest.raises(ValueError, match="recompute must be one of 'none', 'selective', 'full', not"):
            published(shapes.TINY, 1, 8, recompute=wrong)
    for shape in (shapes.LLAMA3_8B, dataclasses.replace(shapes.TINY, kv_heads=2), dataclasses.replace(shapes.TINY, feed_forward=8)):
        with pytest.raises(ValueError, match="The published formula is for a GPT"):
            published(shape, 1, 8)
    assert activations.kept(shapes.LLAMA3_8B, 1, 8)
