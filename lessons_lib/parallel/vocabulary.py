"""Both ends of a language model, cut by vocabulary: rank r of n holds V/n rows of the table and makes V/n of the logits."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from .conjugates import g
from .linears import cut, parameter
from .messages import position


class VocabularyParallelEmbedding(nn.Module):
    """tokens (batch, sequence), the same on all ranks -> x (batch, sequence, hidden). Cut from a whole nn.Embedding.

    A rank gives zeros for the tokens of others, and leave sums: g (an all-reduce of b s h forward, no call backward) or
    scatter_sequence. ValueError where n does not divide the vocabulary; IndexError for a number that is not a token.
    """

    sharded = ("weight",)

    def __init__(self, full: nn.Embedding, group=None, *, leave=g):
        super().__init__()
        if not isinstance(full, nn.Embedding):
            raise TypeError(f"A whole nn.Embedding is needed, to be cut here, not {full!r} (a {type(full).__name__}).")
        for option in ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(full, option) is not None and getattr(full, option) is not False:
                raise ValueError(
                    f"The embedding has {option}={getattr(full, option)!r}, which its parts cannot keep: leave it out."
                )
        self.group, self.leave, self.vocabulary = group, leave, full.num_embeddings
        self.weight = parameter(full.weight, lambda w: cut(w, [self.vocabulary], group, "tokens of the vocabulary"))

    def forward(self, tokens):
        index, elsewhere = local(tokens, self.weight.shape[0], self.vocabulary, self.group)
        try:
            x = F.embedding(index, self.weight)
        except IndexError:
            raise IndexError(
                f"tokens holds a number that is not a token: the vocabulary has {self.vocabulary:,}, 0 to {self.vocabulary - 1:,}."
            ) from None
        return self.leave(x.masked_fill(elsewhere[..., None], 0.0), self.group)


def vocabulary_parallel_loss(logits, targets, group=None):
    """Mean cross-entropy over all tokens, in nats, the same on all ranks: logits (batch, sequence, V/n), targets (batch, sequence).

    Logits are never gathered. Two all-reduces forward: the largest logit (b s elements), so that no exponential overflows; then the
    sum of exponentials and the target's logit (2 b s). None backward. In float32; in float64 where the logits are.
    Source: arXiv:1909.08053, section 3.
    """
    if not isinstance(logits, torch.Tensor) or logits.dim() != 3 or not logits.is_floating_point():
        raise TypeError(f"logits must be a floating-point tensor of (batch, sequence, vocabulary / ranks), not {_shown(logits)}.")
    if not isinstance(targets, torch.Tensor) or targets.dtype != torch.int64:
        raise TypeError(f"targets must be a torch.int64 tensor of tokens, (batch, sequence), not {_shown(targets)}.")
    if targets.shape != logits.shape[:2] or targets.numel() == 0:
        raise ValueError(
            f"targets {tuple(targets.shape)} must hold one token for each of the logits {tuple(logits.shape)}, and at least one."
        )
    return _Loss.apply(logits.contiguous(), targets, group)


def cross_entropy(logits, index, elsewhere, group=None):
    """(loss of each token, this rank's part of the softmax): logits (batch, sequence, V/n); index, elsewhere as of `local`."""
    largest = logits.amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    shifted = logits - largest[..., None]
    target = picked(shifted, index, group).masked_fill(elsewhere, 0.0)
    exponentials = shifted.exp()
    sums = torch.stack([exponentials.sum(-1), target])
    dist.all_reduce(sums, group=group)
    total, target = sums
    return total.log() - target, exponentials.div_(total[..., None])


def picked(logits, index, group=None):
    """logits[..., index], one of each row. IndexError where a target was no token."""
    try:
        return logits.gather(-1, index[..., None]).squeeze(-1)
    except (IndexError, RuntimeError):
        last = logits.shape[-1] * position(group)[1] - 1
        raise IndexError(f"targets holds a number that is not a token: 0 to {last:,} are.") from None


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, group):
        rows = logits.shape[-1]
        index, elsewhere = local(targets, rows, rows * position(group)[1], group)
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses, probabilities = cross_entropy(exact, index, elsewhere, group)
        ctx.save_for_backward(probabilities, index, elsewhere)
        ctx.dtype = logits.dtype
        return losses.mean()

    @staticmethod
    def backward(ctx, gradient):
        probabilities, index, elsewhere = ctx.saved_tensors
        hit = torch.where(elsewhere, 0.0, 1.0).to(probabilities.dtype)
        change = probabilities.scatter_add(-1, index[..., None], -hit[..., None])  # softmax minus one at the target
        return (change * (gradient / index.numel())).to(ctx.dtype), None, None


def local(tokens, rows, vocabulary, group=None):
    """(row of this rank's table or 0, whether the token is another rank's). A number that is no token stays out of range."""
    first = position(group)[0] * rows
    tokens = numbered(tokens)
    here = (tokens >= first) & (tokens < first + rows)
    elsewhere = ~here & (tokens >= 0) & (tokens < vocabulary)
    return (tokens - first).masked_fill(elsewhere, 0), elsewhere


def numbered(tokens):
    """`tokens`, if they are whole numbers."""
    if not isinstance(tokens, torch.Tensor) or tokens.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"tokens must be whole numbers, a torch.int64 tensor of (batch, sequence), not {_shown(tokens)}.")
    return tokens


def _shown(value) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor of {tuple(value.shape)}"
    return f"{value!r} (a {type(value).__name__})"
