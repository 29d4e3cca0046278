"""The small transformer that every lesson splits: plain PyTorch, buildable at any shape of shapes.py.

    model = Transformer(shapes.TINY)
    loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])

Transformer = Embedding, Blocks, Head, each a module of its own, so that a pipeline stage is a run of them:
tokens (batch, sequence) -> x (batch, sequence, hidden) -> ... -> logits (batch, sequence, vocabulary).
A Block is x + Attention(norm(x)), then x + MLP(norm(x)). Its matrices are named as in the papers: `qkv`, `out`, `up`, `down` (and
`gate`). Their `weight` is (outputs, inputs), the transpose of the A in Y = XA.

Every module takes by keyword: dtype (torch.float32), device ("cpu"), seed (0: see filled.py). All but Head take dropout (0.0);
Transformer, Block and Attention take attention (plain_attention, or fused_attention).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ..shapes import Shape
from .filled import Linear, Table, check, check_stream, described, norm
from .functions import fused_attention, next_token_loss, plain_attention, rotate

__all__ = [
    "MLP", "Attention", "Block", "Embedding", "Head", "Transformer",
    "fused_attention", "next_token_loss", "plain_attention", "rotate",
]  # fmt: skip


# ---- the whole, and its three kinds of part -------------------------------------------------------------------------------


class Transformer(nn.Module):
    """tokens (batch, sequence), whole numbers -> logits (batch, sequence, vocabulary)."""

    def __init__(self, shape: Shape, *, dropout=0.0, attention=None, **make):
        super().__init__()
        check(shape, 0, dropout, attention, make)
        self.shape = shape
        self.embedding = Embedding(shape, dropout=dropout, **make)
        self.blocks = nn.ModuleList(
            Block(shape, layer, dropout=dropout, attention=attention, **make) for layer in range(shape.layers)
        )
        self.head = Head(shape, **make)
        if shape.tied:
            self.head.logits.weight = self.embedding.tokens.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Embedding(nn.Module):
    """tokens (batch, sequence) -> x (batch, sequence, hidden): a row a token, plus one for its position if learned."""

    def __init__(self, shape: Shape, *, dropout=0.0, **make):
        super().__init__()
        check(shape, 0, dropout, None, make)
        self.length = shape.length
        self.tokens = Table("embedding.tokens", shape.vocabulary, shape.hidden, **make)
        self.positions = Table("embedding.positions", shape.length, shape.hidden, **make) if shape.positions == "learned" else None
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens):
        if not isinstance(tokens, torch.Tensor) or tokens.dtype not in (torch.int64, torch.int32) or tokens.dim() != 2:
            raise TypeError(f"tokens must be whole numbers, a torch.int64 tensor of (batch, sequence), not {described(tokens)}.")
        sequence = tokens.shape[1]
        if not 1 <= sequence <= self.length:
            raise ValueError(f"The sequence has {sequence:,} tokens; this model takes 1 to {self.length:,} (its shape's length).")
        try:
            x = self.tokens(tokens)
        except IndexError:
            rows = self.tokens.weight.shape[0]
            raise IndexError(
                f"tokens holds a number that is not a token: the vocabulary has {rows:,}, 0 to {rows - 1:,}."
            ) from None
        if self.positions is not None:
            x = x + self.positions(torch.arange(sequence, device=tokens.device))
        return self.dropout(x)


class Block(nn.Module):
    """x (batch, sequence, hidden) -> the same shape. `layer` counts from 0 and decides the first values alone."""

    def __init__(self, shape: Shape, layer: int = 0, *, dropout=0.0, attention=None, **make):
        super().__init__()
        check(shape, layer, dropout, attention, make)
        self.hidden = shape.hidden
        self.attention_norm = norm(shape, **make)
        self.attention = Attention(shape, layer, dropout=dropout, attention=attention, **make)
        self.mlp_norm = norm(shape, **make)
        self.mlp = MLP(shape, layer, dropout=dropout, **make)

    def forward(self, x):
        check_stream(x, self.hidden)
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Head(nn.Module):
    """x (batch, sequence, hidden) -> logits (batch, sequence, vocabulary): the final norm, then a matrix.

    Alone (on the last stage of a pipeline) it has a logits weight of its own, which starts equal to the embedding's where tied.
    """

    def __init__(self, shape: Shape, **make):
        super().__init__()
        check(shape, 0, 0.0, None, make)
        self.hidden = shape.hidden
        self.norm = norm(shape, **make)
        name = "embedding.tokens" if shape.tied else "head.logits"
        self.logits = Linear(name, shape.hidden, shape.vocabulary, bias=False, **make)

    def forward(self, x):
        check_stream(x, self.hidden)
        return self.logits(self.norm(x))


# ---- inside a block --------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal attention of several heads: x (batch, sequence, hidden) -> the same shape.

    The rows of `qkv.weight` are all query heads, then all key heads, then all value heads, head_size rows each: a plain cut into
    equal parts would part queries from their keys. Heads are counted from what `qkv` gives, so a rank's share of heads works too.
    """

    def __init__(self, shape: Shape, layer: int = 0, *, dropout=0.0, attention=None, **make):
        super().__init__()
        check(shape, layer, dropout, attention, make)
        name = f"blocks.{layer}.attention"
        self.shape, self.attention = shape, attention or plain_attention
        self.qkv = Linear(f"{name}.qkv", shape.hidden, shape.qkv, bias=shape.biases, **make)
        self.out = Linear(f"{name}.out", shape.hidden, shape.hidden, bias=shape.biases, residual=shape.layers, **make)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        shape = self.shape
        check_stream(x, shape.hidden)
        qkv = self.qkv(x)
        keys = qkv.shape[-1] * shape.kv_heads // (shape.heads + 2 * shape.kv_heads)
        parts = qkv.split([qkv.shape[-1] - 2 * keys, keys, keys], dim=-1)
        q, k, v = (
            part.unflatten(-1, (-1, shape.head_size)).transpose(1, 2) for part in parts
        )  # (batch, heads, sequence, head_size)
        if shape.positions == "rotary":
            q, k = rotate(q), rotate(k)
        y = self.attention(q, k, v, self.dropout.p if self.training else 0.0)
        return self.dropout(self.out(y.transpose(1, 2).flatten(2)))


class MLP(nn.Module):
    """x (batch, sequence, hidden) -> the same shape: down(GELU(up x)), or down(SiLU(gate x) * up x) where gated."""

    def __init__(self, shape: Shape, layer: int = 0, *, dropout=0.0, **make):
        super().__init__()
        check(shape, layer, dropout, None, make)
        name, h, f = f"blocks.{layer}.mlp", shape.hidden, shape.feed_forward
        self.hidden = h
        self.gate = Linear(f"{name}.gate", h, f, bias=shape.biases, **make) if shape.gated else None
        self.up = Linear(f"{name}.up", h, f, bias=shape.biases, **make)
        self.down = Linear(f"{name}.down", f, h, bias=shape.biases, residual=shape.layers, **make)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        check_stream(x, self.hidden)
        y = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        return self.dropout(self.down(y))
