"""Tensor parallel: a transformer cut over the ranks of a group, each layer's matrices by columns and rows. Equal to one process.

Each class takes the whole module (named as in the papers: `qkv`, `out`, `up`, `down`, `gate`, norms) and keeps this rank's part.
Per layer of width h and microbatch of b sequences of s: 2 all-reduces of b s h elements forward, 2 backward.
sequence_parallel=True: x is (batch, s/n, hidden) between the matrices, each all-reduce becomes a reduce-scatter and an all-gather
(same bytes, twice the calls), and sum_replicated_gradients must follow backward. The gathered input is kept for backward; Megatron
keeps its part and gathers once more. random: RandomStates, needed where the module drops out.
Sources: arXiv:1909.08053 (tensor parallel), arXiv:2205.05198 (sequence parallel).
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from .conjugates import f, g, gather_sequence, inside, scatter_sequence, share
from .linears import ColumnParallelLinear, RowParallelLinear, replica
from .messages import position
from .replicas import (
    ParallelDropout,
    RandomStates,
    clip_gradients,
    gradient_norm,
    sharded_and_replicated,
    sum_replicated_gradients,
)
from .vocabulary import VocabularyParallelEmbedding, vocabulary_parallel_loss

__all__ = [
    "ColumnParallelLinear", "ParallelAttention", "ParallelBlock", "ParallelDropout", "ParallelMLP", "ParallelTransformer",
    "RandomStates", "RowParallelLinear", "VocabularyParallelEmbedding", "clip_gradients", "f", "g", "gather_sequence",
    "gradient_norm", "inside", "scatter_sequence", "sharded_and_replicated", "sum_replicated_gradients",
    "vocabulary_parallel_loss",
]  # fmt: skip


class ParallelMLP(nn.Module):
    """x -> down(GELU(up x)), or down(SiLU(gate x) * up x): up and gate by columns, down by rows. One call in, one out."""

    def __init__(self, mlp, group=None, *, sequence_parallel=False, random=None):
        super().__init__()
        needs(mlp, "an MLP", "up", "down", "gate", "dropout")
        self.group = group
        self.enter, leave = edges(sequence_parallel)
        self.up = ColumnParallelLinear(mlp.up, group, enter=inside)
        self.gate = None if mlp.gate is None else ColumnParallelLinear(mlp.gate, group, enter=inside)
        self.down = RowParallelLinear(mlp.down, group, leave=leave)
        self.dropout = dropout_between(mlp.dropout.p, sequence_parallel, random)

    def forward(self, x):
        x = self.enter(x, self.group)  # once for both up and gate, so that backward sums their gradients in one call
        y = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        return self.dropout(self.down(y))


class ParallelAttention(nn.Module):
    """Attention, each rank with heads / n of the heads: `qkv` by columns, Q, K and V each on its own, `out` by rows.

    The given module's own forward runs on this rank's heads: it must count them from what `qkv` gives. Its `shape` says heads,
    kv_heads and head_size. ValueError where n does not divide heads and kv_heads.
    """

    def __init__(self, attention, group=None, *, sequence_parallel=False, random=None):
        super().__init__()
        needs(attention, "an attention", "qkv", "out", "attention", "dropout", "shape")
        shape = whole_heads(attention.shape, group)
        self.group = group
        self.enter, leave = edges(sequence_parallel)
        parts = [heads * shape.head_size for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
        self.heads = replaced(
            attention,
            qkv=ColumnParallelLinear(attention.qkv, group, parts=parts, enter=inside),
            out=RowParallelLinear(attention.out, group, leave=leave),
            dropout=dropout_between(attention.dropout.p, sequence_parallel, random),
        )
        self.heads.attention = dropout_of_heads(attention, random)

    def forward(self, x):
        return self.heads(self.enter(x, self.group))


class ParallelBlock(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)). Norms are replicated. x is (batch, s, hidden), or (batch, s/n, hidden)."""

    def __init__(self, block, group=None, *, sequence_parallel=False, random=None):
        super().__init__()
        needs(block, "a block", "attention_norm", "attention", "mlp_norm", "mlp")
        options = {"sequence_parallel": sequence_parallel, "random": random}
        self.attention_norm = replica(block.attention_norm)
        self.attention = ParallelAttention(block.attention, group, **options)
        self.mlp_norm = replica(block.mlp_norm)
        self.mlp = ParallelMLP(block.mlp, group, **options)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class ParallelTransformer(nn.Module):
    """tokens (batch, s), the same on all ranks -> this rank's logits (batch, s, vocabulary / n), for vocabulary_parallel_loss.

    Besides the layers: one all-reduce forward after the embedding, one backward before the logits. Tied weights are one shard,
    used twice.
    """

    def __init__(self, model, group=None, *, sequence_parallel=False, random=None):
        super().__init__()
        needs(model, "a transformer", "embedding", "blocks", "head")
        embedding, head = model.embedding, model.head
        enter, leave = edges(sequence_parallel)
        self.group, self.sequence_parallel = group, sequence_parallel
        self.tokens = VocabularyParallelEmbedding(embedding.tokens, group, leave=leave)
        self.positions = replica(embedding.positions)
        self.dropout = dropout_between(embedding.dropout.p, sequence_parallel, random)
        self.blocks = nn.ModuleList(
            ParallelBlock(block, group, sequence_parallel=sequence_parallel, random=random) for block in model.blocks
        )
        self.norm = replica(head.norm)
        self.logits = ColumnParallelLinear(head.logits, group, enter=enter)
        if head.logits.weight is embedding.tokens.weight:
            self.logits.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens)
        if self.positions is not None:
            if tokens.shape[1] > self.positions.num_embeddings:
                raise ValueError(
                    f"The sequence has {tokens.shape[1]:,} tokens; this model takes 1 to {self.positions.num_embeddings:,}: "
                    "its position table has no more rows."
                )
            first = position(self.group)[0] * x.shape[1] if self.sequence_parallel else 0
            x = x + self.positions(torch.arange(first, first + x.shape[1], device=x.device))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x))


# ---- what they share -------------------------------------------------------------------------------------------------------


def edges(sequence_parallel):
    """(enter, leave): the calls at the two edges of a region in which each rank does a part."""
    if not isinstance(sequence_parallel, bool):
        raise TypeError(f"sequence_parallel must be True or False, not {sequence_parallel!r}.")
    return (gather_sequence, scatter_sequence) if sequence_parallel else (f, g)


def dropout_between(p, sequence_parallel, random):
    """Dropout between the matrices: there x is a replica, or under sequence parallel another part on every rank."""
    if not p and random is not None and not isinstance(random, RandomStates):
        raise TypeError(f"random must be RandomStates(seed, group), or None where nothing drops out, not {random!r}.")
    if p and not isinstance(random, RandomStates):
        raise ValueError(
            f"The module drops out {p:.0%}, so random must be RandomStates(seed, group), not {random!r}: replicas must share masks."
        )
    return ParallelDropout(p, None if not p else random.sharded if sequence_parallel else random.replicated)


def dropout_of_heads(attention, random):
    """The attention function of a module; where it drops out, drawing from this rank's own stream: each rank has other heads."""
    if not attention.dropout.p:
        return attention.attention
    return Drawing(attention.attention, random.sharded)


class Drawing:
    """A function that draws its random numbers from a stream."""

    def __init__(self, function, stream):
        self.function, self.stream = function, stream

    def __call__(self, *args):
        with self.stream():
            return self.function(*args)


def whole_heads(shape, group):
    """`shape`; ValueError where the ranks cannot have the same number of whole heads each."""
    _, n = position(group)
    share(shape.heads, "query heads", group)
    if shape.kv_heads < n:
        raise ValueError(
            f"{n} ranks, but only {shape.kv_heads} key and value heads: each rank needs a whole one for its query heads. "
            f"Copies of a head on several ranks would need their gradients summed, which is not built here: use at most "
            f"{shape.kv_heads} ranks."
        )
    share(shape.kv_heads, "key and value heads", group)
    return shape


def replaced(module, **modules):
    """A copy of `module` with some of its modules replaced; it shares the others."""
    new = copy.copy(module)
    new._modules = {**module._modules, **modules}  # a plain copy would share this dict and change the original
    return new


def needs(module, what, *names) -> None:
    missing = [name for name in names if not hasattr(module, name)]
    if not isinstance(module, nn.Module) or missing:
        shown = f"a {type(module).__name__} without {', '.join(missing)}" if missing else f"a {type(module).__name__}"
        raise TypeError(f"{what[0].upper()}{what[1:]} with {', '.join(names)} is needed, named so, not {shown}.")
