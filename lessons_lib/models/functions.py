"""What the transformer computes without parameters: attention, written out and fused; rotary positions; the loss."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from .filled import check_dropout, described

ROTARY_BASE = 10_000.0  # of the wavelengths [arXiv:2104.09864, section 3.2.2]


def plain_attention(q, k, v, dropout: float = 0.0):
    """Causal attention written out: softmax(q k^T / sqrt(head_size)) v, every score kept for backward.

    q (batch, heads, sequence, head_size); k and v (batch, kv_heads, sequence, head_size) -> as q. `dropout` is the share of weights
    set to zero. Query heads 0, 1, ... share key head 0, and so on. [arXiv:1706.03762; grouped: arXiv:2305.13245]
    """
    check_dropout(dropout)
    k, v = _for_each_query_head(q, k, v)
    future = torch.full((q.shape[2], q.shape[2]), -math.inf, dtype=q.dtype, device=q.device).triu(1)
    weights = F.softmax(q @ k.transpose(2, 3) / math.sqrt(q.shape[3]) + future, dim=-1)
    return F.dropout(weights, dropout) @ v


def fused_attention(q, k, v, dropout: float = 0.0):
    """The same by PyTorch's own scaled_dot_product_attention, which (without dropout) keeps no scores. [arXiv:2205.14135]"""
    check_dropout(dropout)
    k, v = _for_each_query_head(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)


def _for_each_query_head(q, k, v):
    if not all(isinstance(t, torch.Tensor) and t.dim() == 4 for t in (q, k, v)):
        shown = ", ".join(map(described, (q, k, v)))
        raise TypeError(f"q, k and v must be tensors of (batch, heads, sequence, head_size), not {shown}.")
    same = k.shape == v.shape and q.shape[0] == k.shape[0] and q.shape[2:] == k.shape[2:]
    if not same or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not fit: k and v must be alike, with the batch, "
            "sequence and head_size of q, and their heads must divide those of q."
        )
    times = q.shape[1] // k.shape[1]
    return (k, v) if times == 1 else (k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1))


def rotate(x):
    """Rotary positions: x (..., sequence, head_size) -> the same shape. Numbers i and i + head_size/2 are a point in the plane,
    turned by position x base^(-2i/head_size). Made anew at each call. Source: arXiv:2104.09864; paired as in Hugging Face's Llama.
    """
    if not isinstance(x, torch.Tensor) or x.dim() < 2 or x.shape[-1] % 2 or not x.is_floating_point():
        raise TypeError(f"x must be a tensor of (..., sequence, head_size) with an even head_size, not {described(x)}.")
    half, exact = x.shape[-1] // 2, torch.promote_types(x.dtype, torch.float32)
    speeds = ROTARY_BASE ** (-torch.arange(half, dtype=exact, device=x.device) / half)
    angles = torch.arange(x.shape[-2], dtype=exact, device=x.device)[:, None] * speeds
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def next_token_loss(logits, targets):
    """Mean cross-entropy over all tokens, in nats: logits (batch, sequence, vocabulary), targets (batch, sequence) -> a scalar.

    In float32; in float64 where the logits are.
    targets[:, i] is the token that follows the one at i: give tokens[:, :-1] to the model and tokens[:, 1:] here.
    """
    if not isinstance(logits, torch.Tensor) or logits.dim() != 3 or not logits.is_floating_point():
        raise TypeError(f"logits must be a tensor of (batch, sequence, vocabulary), as the model returns, not {described(logits)}.")
    if not isinstance(targets, torch.Tensor) or targets.dtype != torch.int64:
        raise TypeError(f"targets must be a torch.int64 tensor of tokens, (batch, sequence), not {described(targets)}.")
    if targets.shape != logits.shape[:2] or targets.numel() == 0:
        raise ValueError(
            f"targets {tuple(targets.shape)} must hold one token for each of the logits {tuple(logits.shape)}, and at least one: "
            "give the model tokens[:, :-1] and the loss tokens[:, 1:]."
        )
    exact = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(exact).flatten(0, 1), targets.flatten())
