"""Activation memory of one block of the course's transformer: what autograd keeps of its forward for its backward, in bytes.

Ground floor: no tensor is made here. `kept` is exact for the block as models.py and parallel/tensor.py build it, where its input
and all its parameters need gradients, with PyTorch's operators on the CPU: a test holds it against hooks on what autograd saves.
`published` is the papers' count for a GPT of 2-byte numbers: every tensor that a good implementation on a GPU must keep.

Both give bytes by part, under the same names, so that they can be held against each other. s sequence, b batch, h hidden, a heads,
t ranks. A tensor that several operators keep counts once; of a view, all of the memory behind it. Parameters are not counted.
On a GPU PyTorch's dropout keeps a mask of 1 byte a number, LayerNorm its statistics in float32, and fused attention keeps no
weights with dropout either. Sources: arXiv:2205.05198, sections 4.1 and 4.2; PyTorch 2.13.
"""

from __future__ import annotations

from .hardware import number, whole
from .shapes import Shape

PARTS = (
    "inputs of the norms", "statistics of the norms", "inputs of qkv and up", "queries, keys, values", "tables of positions",
    "attention weights", "dropout of attention weights", "output of the heads", "inside the MLP", "dropout masks",
)  # fmt: skip
RECOMPUTE = ("none", "selective", "full")


def kept(
    shape: Shape, batch: int, sequence: int, ranks=1, *, sequence_parallel=False, dropout=0.0, fused=False, bytes_each=4
) -> dict[str, int]:
    """Bytes that autograd keeps of one block on each of `ranks`, by part; all PARTS, in order. Their sum is the whole.

    bytes_each: of a number of the block, 4 (float32) or 2 (bfloat16). fused: PyTorch's own attention, whose CPU version takes the
    written-out way, in float32, when it drops out. Causal masks, and tensors that only forward uses, are not kept.
    """
    b, s, t = _checked(shape, batch, sequence, ranks, sequence_parallel, fused)
    p = number(dropout, "dropout", "a number from 0 up to, but not including, 1", closed=True)
    if p >= 1:
        raise ValueError(f"dropout must be a number from 0 up to, but not including, 1 (0.1 drops a tenth), not {dropout!r}.")
    if isinstance(bytes_each, bool) or bytes_each not in (2, 4):
        raise ValueError(f"bytes_each must be 4 (float32) or 2 (bfloat16), not {bytes_each!r}.")
    e, rotary, grouped, rms = bytes_each, shape.positions == "rotary", shape.kv_heads < shape.heads, shape.norm == "rms"
    stream = b * s * shape.hidden  # numbers of x, replicated
    between = stream // t if sequence_parallel else stream  # the same where it is a part of the sequence
    rows = b * s // t if sequence_parallel else b * s
    queries = stream // t  # numbers of the queries, and of the output, of this rank's heads
    scores = b * shape.heads // t * s * s
    written = not fused or p > 0  # attention written out: its weights are kept
    exact = 4 if fused and written else e  # bytes of a number inside the attention function
    scaled = fused and written  # queries and keys
    copied = written and b > 1 and shape.heads // t > 1

    # Queries, keys and values are cut out of qkv. What is turned, repeated, scaled or converted has memory of its own, and so has
    # what a product of several batches of several heads copies. The others are views: autograd keeps all of qkv behind them.
    own = {
        "queries": rotary or scaled or copied,
        "keys": rotary or grouped or scaled or copied,
        "values": grouped or exact != e or copied,
    }
    attended = sum(own.values()) * queries * exact + (0 if all(own.values()) else b * s * shape.qkv // t * e)
    # Fused attention lays its output out as its queries: turned ones head by head, and `out` takes a copy, token by token.
    laid_out = rotary and not written and shape.heads // t > 1 and s > 1
    bytes_of = (
        2 * between * (8 if rms else e),  # RMSNorm keeps its input and the normalized one, both in float32
        2 * rows * (4 if rms else 2 * e),  # RMSNorm: 1/root mean square; LayerNorm: mean and 1/deviation
        2 * stream * e,
        attended,
        4 * s * shape.head_size // 2 * e if rotary else 0,  # cosines and sines, for queries and for keys
        scores * exact if written else b * shape.heads // t * s * 4,  # fused: the logarithm of each sum of exponentials
        2 * scores * exact if p else 0,  # mask, and what is left of the weights
        (2 if laid_out else 1) * queries * e,
        b * s * shape.feed_forward // t * (4 if shape.gated else 2) * e,  # GELU: input, output; gated: gate, SiLU, up, product
        2 * between * e if p else 0,
    )
    return dict(zip(PARTS, bytes_of, strict=True))


def published(
    shape: Shape, batch: int, sequence: int, ranks=1, *, sequence_parallel=False, recompute="none", fused=False
) -> dict[str, float]:
    """Bytes that one block of a GPT in 16 bits keeps on each of `ranks` after the papers, by part; all PARTS, in order.

    They sum to sbh(34 + 5as/h) on one rank; sbh(10 + 24/t + 5as/ht) on t; sbh/t(34 + 5as/h) with sequence parallel. fused, and
    recompute="selective": without the 5as term. recompute="full": 2sbh, the block's input alone. Dropout is counted.
    Source: arXiv:2205.05198, equations 1, 2, 4 and 6, table 2.
    """
    b, s, t = _checked(shape, batch, sequence, ranks, sequence_parallel, fused)
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute must be one of {', '.join(map(repr, RECOMPUTE))}, not {recompute!r}.")
    if shape.gated or shape.norm != "layer" or shape.feed_forward != 4 * shape.hidden or shape.kv_heads != shape.heads:
        raise ValueError(
            f"The published formula is for a GPT: GELU of 4 x hidden, LayerNorm, as many key as query heads; "
            f"{shape.title} is none. kept(...) counts its block as built."
        )
    sbh, scores = b * s * shape.hidden, b * shape.heads * s * s
    between = sbh / t if sequence_parallel else sbh
    weights = 0 if fused or recompute == "selective" else scores / t
    full = recompute == "full"
    bytes_of = (
        2 * sbh if full else 4 * between, 0, 4 * between, 6 * sbh / t, 0, 2 * weights, 3 * weights, 2 * sbh / t, 16 * sbh / t,
        2 * between,
    )  # fmt: skip
    return {part: float(n) if not full or part == PARTS[0] else 0.0 for part, n in zip(PARTS, bytes_of, strict=True)}


def _checked(shape, batch, sequence, ranks, sequence_parallel, fused):
    if not isinstance(shape, Shape):
        raise TypeError(f"A shape is needed, such as shapes.GPT3_175B, not {shape!r} (a {type(shape).__name__}).")
    for name, flag in (("sequence_parallel", sequence_parallel), ("fused", fused)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be True or False, not {flag!r}.")
    b = whole(batch, "batch (sequences)", 1, 10**9)
    s = whole(sequence, "sequence (tokens)", 1, shape.length, f": {shape.name or 'this shape'} takes no longer ones")
    t = whole(ranks, "ranks", 1, 10**6)
    cut = {"heads": shape.heads, "kv_heads": shape.kv_heads, "feed_forward": shape.feed_forward}
    if sequence_parallel:
        cut["tokens of the sequence"] = s
    for what, size in cut.items():
        if size % t:
            raise ValueError(f"{t} ranks cannot share the {size:,} {what} equally: {size:,} / {t} leaves {size % t} over.")
    return b, s, t
