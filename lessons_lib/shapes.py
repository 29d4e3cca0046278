"""The shapes of transformers: how many layers, how wide, how many heads; what follows from them; well-known ones with sources.

Ground floor: no tensor is made here. Everything counted is exact, from closed forms: parameters, bytes, and floating-point
operations (FLOPs; a multiply and an add are two) of the matrix products. The model of that shape is in models.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral

NORMS = ("layer", "rms")  # LayerNorm: weight and bias; RMSNorm: weight alone
POSITIONS = ("learned", "rotary")  # a table of `length` rows; or none, queries and keys are turned
LARGEST = {"layers": 10_000, "vocabulary": 10_000_000, "length": 100_000_000}
LARGEST_WIDTH = 10_000_000


@dataclass(frozen=True)
class Shape:
    """The shape of a decoder-only transformer with pre-norm blocks: attention, then a feed-forward network (the MLP).

    layers: blocks. hidden: width of the residual stream (h). heads: query heads, each `head_size` = hidden / heads wide.
    kv_heads: key and value heads (None: as many as heads); fewer is grouped-query attention [arXiv:2305.13245].
    feed_forward: width inside the MLP (None: 4 x hidden). gated: SiLU(gate) x up instead of GELU(up) [arXiv:2002.05202].
    vocabulary: tokens it knows. length: the longest sequence. biases: whether linear layers have them (the logits never do).
    norm: "layer" or "rms". positions: "learned" or "rotary". tied: logits share the weight of the embedding.
    None is replaced when the shape is made: dataclasses.replace(shape, hidden=...) keeps feed_forward and kv_heads as they are.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    length: int
    kv_heads: int | None = None
    feed_forward: int | None = None
    gated: bool = False
    biases: bool = True
    norm: str = "layer"
    positions: str = "learned"
    tied: bool = True
    name: str = ""
    source: str = field(default="", repr=False, compare=False)

    def __post_init__(self):
        if not isinstance(self.name, str):
            raise TypeError(f"The name of a shape must be text such as 'GPT-3 175B', not {self.name!r}.")
        of = f" of {self.name}" if self.name else " of a shape"
        for what in ("layers", "hidden", "heads", "vocabulary", "length"):
            self._set(what, _whole(getattr(self, what), f"{what}{of}", LARGEST.get(what, LARGEST_WIDTH)))
        self._set("kv_heads", self.heads if self.kv_heads is None else _whole(self.kv_heads, f"kv_heads{of}", LARGEST_WIDTH))
        inside = 4 * self.hidden if self.feed_forward is None else self.feed_forward
        self._set("feed_forward", _whole(inside, f"feed_forward{of}", 4 * LARGEST_WIDTH))
        for what in ("gated", "biases", "tied"):
            if not isinstance(getattr(self, what), bool):
                raise TypeError(f"{what}{of} must be True or False, not {getattr(self, what)!r}.")
        for what, allowed in (("norm", NORMS), ("positions", POSITIONS)):
            if not isinstance(getattr(self, what), str) or getattr(self, what) not in allowed:
                raise ValueError(f"{what}{of} must be {' or '.join(map(repr, allowed))}, not {getattr(self, what)!r}.")
        if self.hidden % self.heads:
            raise ValueError(
                f"{self.heads} heads do not divide the hidden width {self.hidden}{of}: every head is hidden / heads wide. "
                f"Take a number of heads that divides {self.hidden}."
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.kv_heads} kv_heads do not divide the {self.heads} heads{of}: every key and value head serves the same "
                f"number of query heads. Take a number of kv_heads that divides {self.heads}."
            )
        if self.positions == "rotary" and self.head_size % 2:
            raise ValueError(
                f"A head{of} is {self.head_size} wide, which is odd; rotary positions turn pairs. Take an even head size."
            )

    def _set(self, what: str, value) -> None:
        object.__setattr__(self, what, value)  # the way to complete a frozen dataclass

    @property
    def head_size(self) -> int:
        """Width of one head: hidden / heads."""
        return self.hidden // self.heads

    @property
    def qkv(self) -> int:
        """Rows of the fused query-key-value projection: (heads + 2 kv_heads) x head_size, which is 3 x hidden without grouping."""
        return (self.heads + 2 * self.kv_heads) * self.head_size

    @property
    def title(self) -> str:
        """As shown to a learner: "GPT-3 175B: 96 layers, hidden 12,288, 96 heads, 174.6 billion parameters"."""
        total = total_parameters(self)
        unit, word = next(((u, w) for u, w in ((1e9, " billion"), (1e6, " million")) if total >= u), (1, ""))
        count = f"{total / unit:.1f}{word}" if word else f"{total:,}"
        heads = f"{self.heads} heads" + (f" ({self.kv_heads} for keys and values)" if self.kv_heads < self.heads else "")
        name = self.name or "a transformer"
        return f"{name}: {self.layers} layer{'s'[: self.layers > 1]}, hidden {self.hidden:,}, {heads}, {count} parameters"


def _whole(value, what: str, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{what} must be a whole number from 1 to {high:,}, not {value!r} (a {type(value).__name__}).")
    if not 1 <= value <= high:
        shown = f"{value:,}" if abs(value) < 10**15 else "far too large"
        raise ValueError(f"{what} is {shown}, but must be a whole number from 1 to {high:,}.")
    return int(value)


def _shape(value) -> Shape:
    if not isinstance(value, Shape):
        raise TypeError(
            f"A shape is needed, such as shapes.GPT3_175B or Shape(layers=4, ...), not {value!r} (a {type(value).__name__})."
        )
    return value


# ---- parameters and bytes ------------------------------------------------------------------------------------------------


def layer_weights(shape: Shape) -> dict[str, int]:
    """Parameters of the matrices of one block, by name: qkv, out, up, down, and gate where there is one. Biases not included.

    12 h^2 for a GPT: 3 h^2 + h^2 in attention, 4 h^2 + 4 h^2 in the MLP. Source: arXiv:2104.04473, section 3.
    """
    h, f = _shape(shape).hidden, shape.feed_forward
    gate = {"gate": h * f} if shape.gated else {}
    return {"qkv": h * shape.qkv, "out": h * h, **gate, "up": h * f, "down": f * h}


def layer_parameters(shape: Shape) -> dict[str, int]:
    """Parameters of one block by part, biases included: attention_norm, qkv, out, mlp_norm, (gate,) up, down."""
    weights = layer_weights(shape)
    outputs = {"qkv": shape.qkv, "out": shape.hidden, "gate": shape.feed_forward, "up": shape.feed_forward, "down": shape.hidden}
    linear = {part: count + shape.biases * outputs[part] for part, count in weights.items()}
    norm = _norm(shape)
    mlp = {part: count for part, count in linear.items() if part not in ("qkv", "out")}
    return {"attention_norm": norm, "qkv": linear["qkv"], "out": linear["out"], "mlp_norm": norm, **mlp}


def _norm(shape: Shape) -> int:
    return shape.hidden * (2 if shape.norm == "layer" else 1)


def parameters(shape: Shape) -> dict[str, int]:
    """Parameters by part: embedding, positions, layers (all of them), final_norm, logits (0 where tied). They sum to the total."""
    return {
        "embedding": _shape(shape).vocabulary * shape.hidden,
        "positions": shape.length * shape.hidden if shape.positions == "learned" else 0,
        "layers": shape.layers * sum(layer_parameters(shape).values()),
        "final_norm": _norm(shape),
        "logits": 0 if shape.tied else shape.vocabulary * shape.hidden,
    }


def total_parameters(shape: Shape) -> int:
    """All parameters. For a GPT 12 l h^2 (1 + 13/(12h) + (V + s)/(12 l h)) + 2h. Source: arXiv:2104.04473, eq. 2, which drops
    the final norm's 2h."""
    return sum(parameters(shape).values())


def parameter_bytes(shape: Shape, bytes_each: int = 2) -> int:
    """Bytes of all parameters, each `bytes_each` bytes: 2 in bfloat16, 4 in float32. 16 with gradient and Adam states (mixed)."""
    return total_parameters(shape) * _whole(bytes_each, "bytes_each (bytes of one parameter)", 64)


def kv_cache_bytes(shape: Shape, tokens: int, bytes_each: int = 2) -> int:
    """Bytes that keys and values of `tokens` tokens take: 2 x layers x kv_heads x head_size numbers a token. arXiv:2211.05102."""
    each = 2 * _shape(shape).layers * shape.kv_heads * shape.head_size
    return each * _whole(tokens, "tokens", 10**12) * _whole(bytes_each, "bytes_each (bytes of one number)", 64)


# ---- floating-point operations -------------------------------------------------------------------------------------------


def layer_flops(shape: Shape, sequence: int) -> dict[str, int]:
    """Forward FLOPs of one block for each token of a sequence of `sequence` tokens, by part.

    2 for each weight of a matrix; and 2 s h each for `scores` (queries x keys) and `mixing` (weights x values), whatever the
    number of kv_heads. Causal attention is counted as if nothing were masked, as the papers and PyTorch's flop counter do.
    Source: arXiv:2104.04473, appendix (eq. 3); arXiv:2204.02311, appendix B.
    """
    weights = layer_weights(shape)
    attention = 2 * _sequence(shape, sequence) * shape.hidden
    first = {"qkv": 2 * weights.pop("qkv"), "scores": attention, "mixing": attention}
    return {**first, **{part: 2 * count for part, count in weights.items()}}


def logits_flops(shape: Shape) -> int:
    """Forward FLOPs of the logits for each token: 2 h V. The embedding is a look-up and costs none. arXiv:2104.04473, appendix."""
    return 2 * _shape(shape).hidden * shape.vocabulary


def forward_flops(shape: Shape, sequence: int) -> int:
    """Forward FLOPs for each token: all layers and the logits. 2 x (parameters in matrices) + 4 l s h. arXiv:2204.02311, app. B."""
    return _shape(shape).layers * sum(layer_flops(shape, sequence).values()) + logits_flops(shape)


def training_flops(shape: Shape, sequence: int) -> int:
    """Forward and backward FLOPs for each token, without recomputation: 3 x forward, since the gradient of a matrix product is
    two products of the same size. 6 N + 12 l s h. Source: arXiv:2204.02311, appendix B."""
    return 3 * forward_flops(shape, sequence)


def _sequence(shape: Shape, sequence: int) -> int:
    sequence = _whole(sequence, "sequence (tokens in a sequence)", LARGEST["length"])
    if sequence > shape.length:
        raise ValueError(
            f"A sequence of {sequence:,} tokens is longer than {shape.name or 'this shape'} allows: {shape.length:,}. "
            "Take a shorter one, or dataclasses.replace(shape, length=...)."
        )
    return sequence


# ---- well-known shapes ---------------------------------------------------------------------------------------------------


def gpt(layers: int, hidden: int, heads: int, vocabulary: int, length: int, name: str = "", source: str = "") -> Shape:
    """A GPT: GELU MLP of 4 x hidden, LayerNorm, biases, learned positions, tied logits. Source: Radford et al. 2019 (GPT-2)."""
    return Shape(layers, hidden, heads, vocabulary, length, name=name, source=source)


def llama(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    feed_forward: int,
    vocabulary: int,
    length: int,
    name: str = "",
    source: str = "",
) -> Shape:
    """A Llama: gated MLP, RMSNorm, no biases, rotary positions, logits of their own. Source: arXiv:2302.13971."""
    family = {"gated": True, "biases": False, "norm": "rms", "positions": "rotary", "tied": False}
    return Shape(layers, hidden, heads, vocabulary, length, kv_heads, feed_forward, name=name, source=source, **family)


# These train in seconds on characters: one for each ASCII code.
TINY = gpt(4, 64, 4, 128, 64, "tiny", "this course")
TINY_LLAMA = llama(4, 64, 4, 2, 160, 128, 64, "tiny Llama", "this course")

GPT2_SMALL = gpt(12, 768, 12, 50257, 1024, "GPT-2 small", "Radford et al. 2019, table 2; vocabulary from section 2.2")

# The table's 1.3B has "24 heads of 128", which is not its width of 2048: 16 heads of 128 are. Its 13B is 5140 wide, which 40
# heads of 128 are not: 5120. GPT-3's alternating sparse attention is left out, as in most reproductions.
_GPT3 = "arXiv:2005.14165, table 2.1; vocabulary and tied logits as in GPT-2"
GPT3_1_3B = gpt(24, 2048, 16, 50257, 2048, "GPT-3 1.3B", f"{_GPT3}; 16 heads of 128, since the table's 24 do not fit its width")
GPT3_6_7B = gpt(32, 4096, 32, 50257, 2048, "GPT-3 6.7B", _GPT3)
GPT3_13B = gpt(40, 5120, 40, 50257, 2048, "GPT-3 13B", f"{_GPT3}; hidden 5120 = 40 heads of 128, the table prints 5140")
GPT3_175B = gpt(96, 12288, 96, 50257, 2048, "GPT-3 175B", _GPT3)

LLAMA2_7B = llama(
    32, 4096, 32, 32, 11008, 32000, 4096, "Llama-2 7B", "arXiv:2307.09288; sizes from the released model's config.json"
)
LLAMA3_8B = llama(32, 4096, 32, 8, 14336, 128256, 8192, "Llama-3 8B", "arXiv:2407.21783, table 3; released vocabulary 128,256")
LLAMA3_70B = llama(80, 8192, 64, 8, 28672, 128256, 8192, "Llama-3 70B", "arXiv:2407.21783, table 3; released vocabulary 128,256")

_MEGATRON = "arXiv:2104.04473, table 1 (vocabulary 51,200, sequence 2,048)"
_SIZES = (
    ("1.7B", 24, 2304, 24), ("3.6B", 30, 3072, 32), ("7.5B", 36, 4096, 32), ("18.4B", 40, 6144, 48), ("39.1B", 48, 8192, 64),
    ("76.1B", 60, 10240, 80), ("145.6B", 80, 12288, 96), ("310.1B", 96, 16384, 128), ("529.6B", 105, 20480, 128),
    ("1008B", 128, 25600, 160),
)  # fmt: skip
MEGATRON = tuple(gpt(*size, 51200, 2048, f"Megatron {name}", _MEGATRON) for name, *size in _SIZES)

SHAPES = (TINY, TINY_LLAMA, GPT2_SMALL, GPT3_1_3B, GPT3_6_7B, GPT3_13B, GPT3_175B, LLAMA2_7B, LLAMA3_8B, LLAMA3_70B, *MEGATRON)


def find(name: str) -> Shape:
    """The shape of that name in SHAPES, capital letters or not: find("Llama-3 8B"). ValueError lists the names."""
    found = [shape for shape in SHAPES if isinstance(name, str) and shape.name.casefold() == name.strip().casefold()]
    if not found:
        raise ValueError(f"There is no shape named {name!r}. These are known: {', '.join(shape.name for shape in SHAPES)}.")
    return found[0]
