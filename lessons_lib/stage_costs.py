"""What the stages of a transformer compute, send and keep, predicted from its shape: matrix products, boundary bytes, memory.

Stage 0 has the embedding, the last stage the logits, so stages with equally many layers are not equally slow: layers=[...] balances
them. s sequence, b sequences of a microbatch, h hidden, V vocabulary. Every number here is predicted. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import splitting
from .activations import kept, published
from .hardware import number, whole
from .parallel.actions import check_orders, size_of
from .parallel.cuts import layers_of_stages
from .recording import Operator
from .shapes import Shape, layer_flops, layer_parameters, layer_weights, logits_flops, parameters

BYTES = 2  # of a number in 16 bits
RECIPES = {  # bytes a parameter: weight, gradient, what the optimizer keeps [arXiv:1910.02054, section 3.1]
    "mixed precision, Adam": 16,  # 2 + 2 in 16 bits; master weight and two moments in 32
    "mixed precision, Adam, 32-bit gradients": 18,
    "32 bits, Adam": 16,
    "32 bits, plain SGD": 8,
}
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Work:
    """What one action computes: operators, and how often each."""

    operators: tuple[tuple[Operator, int], ...]

    @property
    def flops(self) -> int:
        """Floating-point operations in all."""
        return sum(operator.flops * count for operator, count in self.operators)

    @property
    def nbytes(self) -> int:
        """Bytes read and written in all."""
        return sum(operator.nbytes * count for operator, count in self.operators)

    def __add__(self, other: Work) -> Work:
        return Work(self.operators + other.operators)

    def scaled(self, factor: float) -> Work:
        """As many operators, each with `factor` times the FLOPs and bytes."""
        factor = number(factor, "The factor", "a finite number, 0 or more", closed=True)
        return Work(tuple((Operator(o.name, round(o.flops * factor), round(o.nbytes * factor)), n) for o, n in self.operators))


def layers_per_stage(shape: Shape, stages: int, layers=None) -> list[int]:
    """How many layers each stage has: as `layers` says, or as even as can be, those in the middle with one more."""
    _checked(shape, 1, 1)
    return [len(cut) for cut in layers_of_stages(shape.layers, stages, layers)]


def balanced_layers(shape: Shape, stages: int, sequence: int) -> list[int]:
    """How many layers each stage should have so that the slowest computes as little as can be: the last has the logits besides.

    Each layer goes to the stage that has least to do, to the later one of equals: the first ones keep most microbatches.
    """
    _checked(shape, 1, sequence)
    stages = whole(stages, "The number of stages", 1, shape.layers, ": each needs a layer")
    layer, load = sum(layer_flops(shape, sequence).values()), [0] * stages
    load[-1] = logits_flops(shape)
    counts = [0] * stages
    for _ in range(shape.layers):
        stage = min(range(stages), key=lambda i: (load[i], -i))
        load[stage] += layer
        counts[stage] += 1
    return counts


def boundary_bytes(shape: Shape, sequence: int, microbatch: int = 1) -> int:
    """Bytes of one message between stages, forward or backward: b s h numbers of 2 bytes. Source: arXiv:2104.04473, section 2.2."""
    b, s = _checked(shape, microbatch, sequence)
    return int(splitting.boundary_bytes(b, s, shape.hidden, BYTES))


def work_of_stages(shape: Shape, stages: int, sequence: int, microbatch: int = 1, *, layers=None, split=False, recompute="none"):
    """(forward, backward, weight): lists of Work, one for each stage, of a microbatch of `microbatch` sequences, in 16 bits.

    The matrix products of the layers and, on the last stage, of the logits; each reads its two factors and writes its result. Small
    operators are left out. Backward is two products for each: of the input's gradient and the weight's. split: backward has the
    first (and both of attention's, which has no weights), weight the second. recompute="full": backward begins with the layers'
    forward again; "selective": with attention's. Source of the FLOPs: arXiv:2104.04473, appendix.
    """
    b, s = _checked(shape, microbatch, sequence)
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute must be one of {', '.join(map(repr, RECOMPUTE))}, not {recompute!r}.")
    if not isinstance(split, bool):
        raise TypeError(f"split must be True or False, not {split!r}.")
    counts = layers_per_stage(shape, stages, layers)
    weights, flops = layer_weights(shape), layer_flops(shape, s)
    h, rows = shape.hidden, b * s
    outputs = _outputs(shape)
    products = [
        Operator(part, rows * flops[part], BYTES * (size + rows * (size // outputs[part] + outputs[part])))
        for part, size in weights.items()
    ]
    attention = [
        Operator(part, rows * flops[part], BYTES * (2 * rows * h + b * shape.heads * s * s)) for part in ("scores", "mixing")
    ]
    logits = Operator("logits", 2 * rows * h * shape.vocabulary, BYTES * (h * shape.vocabulary + rows * (h + shape.vocabulary)))
    forward, backward, weight = [], [], []
    for stage, count in enumerate(counts):
        last = [(logits, 1)] * (stage == stages - 1)
        linear = [(one, count) for one in products if count] + last
        others = [(one, count) for one in attention if count]
        again = {"none": [], "selective": others, "full": others + [(one, count) for one in products if count]}[recompute]
        forward.append(Work(tuple(linear + others)))
        weight.append(Work(tuple(linear if split else ())))
        backward.append(Work(tuple(again + linear + [(one, 2 * n) for one, n in others] + ([] if split else linear))))
    return forward, backward, weight


# ---- memory --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one rank: `states` (weights, gradients, optimizer), `activations` at their peak, `parameters` (a number)."""

    rank: int
    layers: int
    parameters: int
    states: int
    activations: int

    @property
    def total(self) -> int:
        return self.states + self.activations


def memory_of_ranks(
    shape: Shape, orders, sequence: int, microbatch: int = 1, *, layers=None, recipe="mixed precision, Adam", recompute="selective"
) -> list[StageMemory]:
    """Peak memory of each rank under these orders (or a Schedule), predicted: states of its stages, and activations in flight.

    A layer keeps sbh(34 + 5as/h) bytes for each microbatch in flight, 34 sbh with selective recomputation or fused attention, 2 sbh
    with full [arXiv:2205.05198, table 2]; shapes that are no GPT: as built in models.py with fused attention. The last stage keeps
    4 sbh + 4 sbV more for its norm and its logits in 32 bits [section 4.3]. Where backward is split, B leaves for W the input and
    the output's gradient of every product with a weight, in 16 bits: 32 sbh for a layer of a GPT, under recomputation too.
    Left out: buffers of messages, the workspace of the libraries, and what recomputation holds for one layer.
    """
    b, s = _checked(shape, microbatch, sequence)
    orders = check_orders(getattr(orders, "orders", orders))
    p, (_, v, split) = len(orders), size_of(orders)
    if recipe not in RECIPES:
        raise ValueError(f"recipe must be one of {', '.join(map(repr, RECIPES))}, not {recipe!r}.")
    counts = layers_per_stage(shape, p * v, layers)
    one = _layer_activations(shape, b, s, recompute)
    edge = 4 * b * s * (shape.hidden + shape.vocabulary)
    keeps = [count * one + edge * (stage == p * v - 1) for stage, count in enumerate(counts)]
    waits = _waiting_for_w(shape, b, s, counts) if split else [0] * (p * v)
    numbers = parameters_of_stages(shape, p * v, layers)
    found = []
    for rank, order in enumerate(orders):
        now = most = 0
        for action in order:
            stage = action.chunk * p + rank
            now += {"F": keeps[stage], "B": waits[stage] - keeps[stage], "W": -waits[stage]}[action.kind]
            most = max(most, now)
        mine = sum(numbers[rank::p])
        if p == 1 and shape.tied and v > 1:
            mine -= shape.vocabulary * shape.hidden  # both ends are here: one weight
        found.append(StageMemory(rank, sum(counts[rank::p]), mine, mine * RECIPES[recipe], most))
    return found


def parameters_of_stages(shape: Shape, stages: int, layers=None) -> list[int]:
    """Parameters of each stage. A tied embedding is on the first and on the last, so they add up to more than the model has."""
    counts, parts = layers_per_stage(shape, stages, layers), parameters(shape)
    each = sum(layer_parameters(shape).values())
    found = [count * each for count in counts]
    found[0] += parts["embedding"] + parts["positions"]
    found[-1] += parts["final_norm"] + (parts["embedding"] if shape.tied and stages > 1 else parts["logits"])
    return found


def _layer_activations(shape: Shape, b: int, s: int, recompute: str) -> int:
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute must be one of {', '.join(map(repr, RECOMPUTE))}, not {recompute!r}.")
    if recompute == "full":
        return 2 * s * b * shape.hidden
    gpt = not shape.gated and shape.norm == "layer" and shape.feed_forward == 4 * shape.hidden and shape.kv_heads == shape.heads
    if gpt:
        return int(sum(published(shape, b, s, recompute=recompute).values()))
    return sum(kept(shape, b, s, fused=recompute == "selective", bytes_each=2).values())


def _waiting_for_w(shape: Shape, b: int, s: int, counts: list[int]) -> list[int]:
    """Bytes that each stage keeps of a microbatch between B and W: x and the gradient of y for every y = x A."""
    outputs = _outputs(shape)
    each = sum(size // outputs[part] + outputs[part] for part, size in layer_weights(shape).items())
    last = len(counts) - 1
    logits = shape.hidden + shape.vocabulary
    return [BYTES * b * s * (count * each + logits * (stage == last)) for stage, count in enumerate(counts)]


def _outputs(shape: Shape) -> dict[str, int]:
    """Outputs of each matrix of a layer."""
    h, wide = shape.hidden, shape.feed_forward
    return {"qkv": shape.qkv, "out": h, "gate": wide, "up": wide, "down": h}


def _checked(shape, microbatch, sequence) -> tuple[int, int]:
    if not isinstance(shape, Shape):
        raise TypeError(f"A shape is needed, such as shapes.GPT3_175B, not {shape!r} (a {type(shape).__name__}).")
    b = whole(microbatch, "microbatch (sequences of a microbatch)", 1, 10**6)
    return b, whole(sequence, "sequence (tokens)", 1, shape.length, f": {shape.name or 'this shape'} takes no longer ones")
