"""Plausible wrong answers to the exercises of lesson 04."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from collecting import wrong

from lessons_lib.parallel import tensor


def here():
    return dist.get_rank(), dist.get_world_size()


def summed(x):
    total = x.clone()
    dist.all_reduce(total)
    return total


class Both(torch.autograd.Function):
    """A sum forward, and a sum backward."""

    @staticmethod
    def forward(ctx, x):
        return summed(x)

    @staticmethod
    def backward(ctx, gradient):
        return summed(gradient)


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return summed(gradient)


# ---- drop ----------------------------------------------------------------------------------------------------------


def dropped(x, p, seed, keep_below=False, scale=None):
    numbers = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed))
    stays = numbers < p if keep_below else numbers >= p
    return x * stays / (1 - p if scale is None else scale)


def seed_of(seed, alike):
    return seed if alike else seed + 1 + dist.get_rank()


@wrong("drop", "alike=False: ranks 0 and 1 dropped the same places")
def always_alike(x, p, seed, alike):
    return dropped(x, p, seed)


@wrong("drop", "alike=True: ranks 0 and 1 dropped other places")
def never_alike(x, p, seed, alike):
    return dropped(x, p, seed + dist.get_rank())


@wrong("drop", "so that the mean stays")
def not_scaled(x, p, seed, alike):
    return dropped(x, p, seed_of(seed, alike), scale=1)


@wrong("drop", "p is the part that is dropped, not the part that stays")
def keeps_p(x, p, seed, alike):
    return dropped(x, p, seed_of(seed, alike), keep_below=True)


@wrong("drop", "That divides by p")
def divides_by_p(x, p, seed, alike):
    return dropped(x, p, seed_of(seed, alike), scale=p)


@wrong("drop", "is `seed` used?")
def its_own_seed(x, p, seed, alike):
    return dropped(x, p, seed_of(0, alike))


@wrong("drop", "who has the same seed draws the same numbers")
def sends_the_mask(x, p, seed, alike):
    mask = dropped(torch.ones_like(x), p, seed_of(seed, alike))
    if alike:
        dist.broadcast(mask, 0)
    return x * mask


@wrong("drop", "changed its argument `x`")
def in_place(x, p, seed, alike):
    return x.copy_(dropped(x, p, seed_of(seed, alike)))


# ---- row_product ---------------------------------------------------------------------------------------------------


def columns(weight):
    rank, n = here()
    return weight.tensor_split(n, dim=1)[rank]


def all_reduced(y):
    dist.all_reduce(y)
    return y


@wrong("row_product", "The bias is inside the sum: every rank added it, and it counts 2 times")
def bias_on_every_rank(x, weight, bias):
    return all_reduced(F.linear(x, columns(weight), bias))


@wrong("row_product", "The bias is missing")
def no_bias(x, weight, bias):
    return all_reduced(F.linear(x, columns(weight)))


@wrong("row_product", "the parts of the others are missing")
def own_part(x, weight, bias):
    return F.linear(x, columns(weight), bias)


@wrong("row_product", "the mean over ranks, not the sum")
def mean(x, weight, bias):
    return all_reduced(F.linear(x, columns(weight), bias)) / here()[1]


@wrong("row_product", "the bias was divided to count once in the sum")
def bias_divided(x, weight, bias):
    return all_reduced(F.linear(x, columns(weight), bias / here()[1]))


@wrong("row_product", "Only some rank added it")
def bias_on_rank_0(x, weight, bias):
    return all_reduced(F.linear(x, columns(weight), bias if here()[0] == 0 else None))


@wrong("row_product", "backward through a sum passes it on as it is")
def summed_backward(x, weight, bias):
    return Both.apply(F.linear(x, columns(weight))) + bias


@wrong("row_product", "nothing leads back from it")
def without_a_graph(x, weight, bias):
    with torch.no_grad():
        return all_reduced(F.linear(x, columns(weight))) + bias


@wrong("row_product", "cannot be multiplied (3x3 and 6x")
def rows_of_the_weight(x, weight, bias):
    rank, n = here()
    return all_reduced(F.linear(x, weight.tensor_split(n)[rank])) + bias


@wrong("row_product", "The output is the only thing that others need")
def gathers_the_parts(x, weight, bias):
    y = F.linear(x, columns(weight))
    parts = [torch.empty_like(y) for _ in range(here()[1])]
    dist.all_gather(parts, y.detach())
    return y + (sum(parts) - y.detach()) + bias


@wrong("row_product", "cannot be multiplied (4x2 and 3x6)")
def in_chunks(x, weight, bias):
    rank, n = here()
    return all_reduced(F.linear(x, weight.chunk(n, dim=1)[rank])) + bias


@wrong("row_product", "finished code")
def borrowed(x, weight, bias):
    return tensor.g(F.linear(x, columns(weight))) + bias


# ---- norm_of_copies ------------------------------------------------------------------------------------------------


def squares(gradients, copies):
    return [gradient.square().sum() / k for gradient, k in zip(gradients, copies)]


@wrong("norm_of_copies", "what several hold counts as often as they are")
def every_copy_counts(gradients, copies):
    return summed(sum(squares(gradients, [1] * len(copies)))).sqrt()


@wrong("norm_of_copies", "the root is missing")
def no_root(gradients, copies):
    return summed(sum(squares(gradients, copies)))


@wrong("norm_of_copies", "the norm of what this rank holds")
def own_norm(gradients, copies):
    return sum(squares(gradients, [1] * len(copies))).sqrt()


@wrong("norm_of_copies", "the sum over ranks is missing")
def never_summed(gradients, copies):
    return sum(squares(gradients, copies)).sqrt()


@wrong("norm_of_copies", "The norms of the ranks are added")
def sum_of_norms(gradients, copies):
    return summed(sum(squares(gradients, [1] * len(copies))).sqrt())


@wrong("norm_of_copies", "The norms of the tensors are added")
def sum_of_norms_of_tensors(gradients, copies):
    return summed(sum(gradient.norm() / k for gradient, k in zip(gradients, copies)))


@wrong("norm_of_copies", "divide the squares")
def divided_before_squaring(gradients, copies):
    return summed(sum((gradient / k).square().sum() for gradient, k in zip(gradients, copies))).sqrt()


@wrong("norm_of_copies", "some are held by fewer")
def as_if_on_all(gradients, copies):
    n = here()[1]
    return summed(sum(squares(gradients, [1 if k == 1 else n for k in copies]))).sqrt()


@wrong("norm_of_copies", "only those of this rank are in it")
def sharded_summed_and_copies_here(gradients, copies):
    mine = squares(gradients, [1] * len(copies))
    alone = summed(sum([torch.zeros(()), *(one for one, k in zip(mine, copies) if k == 1)]))
    return (alone + sum(one for one, k in zip(mine, copies) if k > 1)).sqrt()


@wrong("norm_of_copies", "the copies are missing")
def without_copies(gradients, copies):
    zero = torch.zeros(())
    return summed(sum([zero, *(one for one, k in zip(squares(gradients, copies), copies) if k == 1)])).sqrt()


@wrong("norm_of_copies", "add up on the rank first")
def a_call_each(gradients, copies):
    return sum(summed(one) for one in squares(gradients, copies)).sqrt()


@wrong("norm_of_copies", "One number needs to be summed, not the gradients")
def gathers(gradients, copies):
    row = torch.cat([gradient / k**0.5 for gradient, k in zip(gradients, copies)])
    rows = [torch.empty_like(row) for _ in range(here()[1])]
    dist.all_gather(rows, row)
    return torch.cat(rows).norm()


# ---- heads_of_rank -------------------------------------------------------------------------------------------------


def three(qkv, heads, kv_heads, size):
    return qkv.split([heads * size, kv_heads * size, kv_heads * size])


def of(part, first, last, size):
    return part[first * size : last * size]


def my_heads(heads):
    rank, n = here()
    return rank * heads // n, (rank + 1) * heads // n


@wrong("heads_of_rank", "That is the fused matrix cut evenly")
def cut_evenly(qkv, heads, kv_heads, size):
    rank, n = here()
    return qkv.tensor_split(n)[rank]


@wrong("heads_of_rank", "Query head q uses key and value head q // (heads // kv_heads)")
def taken_in_turns(qkv, heads, kv_heads, size):
    q, k, v = three(qkv, heads, kv_heads, size)
    rank, n = here()
    if n <= kv_heads:
        first, last = my_heads(kv_heads)
    else:
        first, last = rank % kv_heads, rank % kv_heads + 1
    return torch.cat([of(q, *my_heads(heads), size), of(k, first, last, size), of(v, first, last, size)])


@wrong("heads_of_rank", "that none of its queries uses are not needed")
def all_keys_and_values(qkv, heads, kv_heads, size):
    q, k, v = three(qkv, heads, kv_heads, size)
    return torch.cat([of(q, *my_heads(heads), size), k, v])


@wrong("heads_of_rank", "The heads are right, in another order")
def values_before_keys(qkv, heads, kv_heads, size):
    q, k, v = three(qkv, heads, kv_heads, size)
    first, last = my_heads(heads)
    used = (first * kv_heads // heads, (last - 1) * kv_heads // heads + 1)
    return torch.cat([of(q, first, last, size), of(v, *used, size), of(k, *used, size)])


@wrong("heads_of_rank", "heads cannot be cut")
def half_a_head(qkv, heads, kv_heads, size):
    rank, n = here()
    return torch.cat([part.tensor_split(n)[rank] for part in three(qkv, heads, kv_heads, size)])


@wrong("heads_of_rank", "It holds Q0, Q2, K0, K2, V0, V2; its heads are Q0, Q1")
def every_second_head(qkv, heads, kv_heads, size):
    rank, n = here()
    parts = [part.unflatten(0, (-1, size)) for part in three(qkv, heads, kv_heads, size)]
    return torch.cat([part[rank::n].flatten(0, 1) for part in parts])


@wrong("heads_of_rank", "Every rank has all of qkv")
def sent_by_rank_0(qkv, heads, kv_heads, size):
    q, k, v = three(qkv, heads, kv_heads, size)
    first, last = my_heads(heads)
    used = (first * kv_heads // heads, (last - 1) * kv_heads // heads + 1)
    dist.broadcast(qkv, 0)
    return torch.cat([of(q, first, last, size), of(k, *used, size), of(v, *used, size)])


# ---- gated_mlp -----------------------------------------------------------------------------------------------------


def cut(gate, up, down):
    rank, n = here()
    return gate.tensor_split(n)[rank], up.tensor_split(n)[rank], down.tensor_split(n, dim=1)[rank]


def gated(x, gate, up, down):
    return F.linear(torch.relu(F.linear(x, gate)) * F.linear(x, up), down)


@wrong("gated_mlp", "autograd sees no other rank")
def all_reduce_alone(x, gate, up, down):
    return all_reduced(gated(x, *cut(gate, up, down)))


@wrong("gated_mlp", "let x enter once, and use it twice")
def entered_twice(x, gate, up, down):
    gate, up, down = cut(gate, up, down)
    y = torch.relu(F.linear(Enter.apply(x), gate)) * F.linear(Enter.apply(x), up)
    return all_reduced(F.linear(y, down))


@wrong("gated_mlp", "The gradient of the sum was summed again")
def summed_both_ways(x, gate, up, down):
    return Both.apply(gated(Enter.apply(x), *cut(gate, up, down)))


@wrong("gated_mlp", "nn.Linear's weight is transposed")
def weights_as_they_lie(x, gate, up, down):
    rank, n = here()
    part = [weight.T.tensor_split(n)[rank] for weight in (gate, up)]
    return all_reduced(gated(Enter.apply(x), *part, down.tensor_split(n, dim=1)[rank]))


@wrong("gated_mlp", "does every rank do all of it")
def whole_on_every_rank(x, gate, up, down):
    return all_reduced(gated(Enter.apply(x), gate, up, down))


@wrong("gated_mlp", "the parts of the others are missing")
def own_part_of_the_mlp(x, gate, up, down):
    return gated(Enter.apply(x), *cut(gate, up, down))


@wrong("gated_mlp", "the parts of a sum are added")
def mean_of_parts(x, gate, up, down):
    return all_reduced(gated(Enter.apply(x), *cut(gate, up, down))) / here()[1]


@wrong("gated_mlp", "This rank uses all of the weight")
def not_parallel_at_all(x, gate, up, down):
    return gated(x, gate, up, down)


@wrong("gated_mlp", "between the two nothing needs to be sent")
def sums_x_too(x, gate, up, down):
    dist.all_reduce(x.detach().clone())
    return all_reduced(gated(Enter.apply(x), *cut(gate, up, down)))


def with_another_gate(x, weights, activation):
    gate, up, down = cut(*weights)
    x = Enter.apply(x)
    return all_reduced(F.linear(activation(F.linear(x, gate)) * F.linear(x, up), down))


@wrong("gated_mlp", "That is silu, as in Llama's gate; here relu was asked for.")
def with_silu(x, gate, up, down):
    return with_another_gate(x, (gate, up, down), F.silu)


@wrong("gated_mlp", "That is gelu; here relu was asked for.")
def with_gelu(x, gate, up, down):
    return with_another_gate(x, (gate, up, down), F.gelu)


@wrong("gated_mlp", "The activation is missing")
def without_activation(x, gate, up, down):
    return with_another_gate(x, (gate, up, down), lambda y: y)


@wrong("gated_mlp", "gate and up have changed places")
def gate_and_up_swapped(x, gate, up, down):
    return with_another_gate(x, (up, gate, down), torch.relu)


@wrong("gated_mlp", "raised RuntimeError")
def down_by_rows_too(x, gate, up, down):
    rank, n = here()
    gate, up, _ = cut(gate, up, down)
    return all_reduced(gated(Enter.apply(x), gate, up, down.tensor_split(n)[rank]))


# ---- split_cross_entropy -------------------------------------------------------------------------------------------


def entropy(logits, targets, first, largest=None, total=summed, target=summed, cut_off=False, counted=None):
    """The loss, and where it may go wrong."""
    if largest is None:
        largest = logits.detach().amax(1)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    shifted = logits - largest[:, None]
    inside = (targets >= first) & (targets < first + logits.shape[1])
    index = (targets - first).where(inside, torch.tensor(0))
    hit = shifted.gather(1, index[:, None])[:, 0].where(inside, torch.tensor(0.0))
    exponentials = shifted.exp().sum(1)
    sums = through(exponentials.detach() if cut_off else exponentials, total)
    return sums.log() - through(hit, target)


def through(x, call):
    """call(x) in value, x in gradient."""
    return x + (call(x.detach()) - x.detach()) if call is not summed else Passed.apply(x)


class Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return summed(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def averaged(losses, targets):
    return losses[targets != -100].mean()


@wrong("split_cross_entropy", "overflows")
def nothing_subtracted(logits, targets, first):
    losses = entropy(logits, targets, first, largest=torch.zeros(len(logits)))
    return averaged(losses, targets)


@wrong("split_cross_entropy", "was one number subtracted from all tokens?")
def largest_of_all_tokens(logits, targets, first):
    largest = logits.detach().amax()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return averaged(entropy(logits, targets, first, largest=largest.expand(len(logits))), targets)


@wrong("split_cross_entropy", "The sum is divided by all 6 tokens")
def over_all_tokens(logits, targets, first):
    losses = entropy(logits, targets, first)
    return losses[targets != -100].sum() / len(targets)


@wrong("split_cross_entropy", "This is the sum over tokens: the mean was asked for")
def sum_of_losses(logits, targets, first):
    return entropy(logits, targets, first)[targets != -100].sum()


@wrong("split_cross_entropy", "This is the softmax over this rank's words alone, for its own targets")
def local_loss(logits, targets, first):
    inside = (targets >= first) & (targets < first + logits.shape[1])
    return F.cross_entropy(logits, torch.where(inside, targets - first, -100))


@wrong("split_cross_entropy", "The logits are the largest tensor of the model")
def gathers_logits(logits, targets, first):
    rank, n = here()
    most = torch.tensor(logits.shape[1])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    padded = F.pad(logits, (0, int(most) - logits.shape[1]), value=float("-inf"))
    rows = [torch.empty_like(padded) for _ in range(n)]
    dist.all_gather(rows, padded.detach())
    rows[rank] = padded
    index = targets.clone()
    starts = [torch.tensor(0) for _ in range(n)]
    dist.all_gather(starts, torch.tensor(first))
    for place, start in enumerate(starts):  # where a word lies after padding
        index = torch.where(targets >= start, targets - start + place * int(most), index)
    return F.cross_entropy(torch.cat(rows, 1), index)


@wrong("split_cross_entropy", "there on the rank that holds it alone")
def target_not_summed(logits, targets, first):
    largest = torch.zeros(len(logits))
    losses = entropy(logits, targets, first, largest=largest, target=lambda x: x)
    return averaged(losses, targets)


@wrong("split_cross_entropy", "was taken for a word")
def ignored_is_word_0(logits, targets, first):
    return entropy(logits, targets.clamp(min=0), first).mean()


@wrong("split_cross_entropy", "Tokens whose target is -100 are in the mean")
def all_tokens_in_the_mean(logits, targets, first):
    return entropy(logits, targets, first).mean()


@wrong("split_cross_entropy", "Every rank subtracted its own largest logit")
def own_largest(logits, targets, first):
    return averaged(entropy(logits, targets, first, largest=logits.detach().amax(1)), targets)


@wrong("split_cross_entropy", "was the sum of exponentials cut off from the graph?")
def sum_detached(logits, targets, first):
    return averaged(entropy(logits, targets, first, cut_off=True), targets)


class Careless(torch.autograd.Function):
    """Right values; `kind` says what backward gets wrong."""

    @staticmethod
    def forward(ctx, logits, targets, first, kind):
        with torch.enable_grad():
            own = logits.detach().requires_grad_()
            value = averaged(entropy(own, targets, first), targets)
            (ctx.gradient,) = torch.autograd.grad(value, own)
        ctx.kind, ctx.counted = kind, int((targets != -100).sum())
        inside = (targets >= first) & (targets < first + logits.shape[1])
        hit = F.one_hot((targets - first).where(inside, torch.tensor(0)), logits.shape[1]) * inside[:, None]
        ctx.hit = hit / ctx.counted
        return value.detach()

    @staticmethod
    def backward(ctx, gradient):
        factor = {"upstream": 1.0, "sum": gradient * ctx.counted, "twice": gradient * here()[1]}.get(ctx.kind, gradient)
        return factor * (ctx.gradient + ctx.hit if ctx.kind == "hit" else ctx.gradient), None, None, None


@wrong("split_cross_entropy", "does not use the gradient that comes from above")
def upstream_forgotten(logits, targets, first):
    return Careless.apply(logits, targets, first, "upstream")


@wrong("split_cross_entropy", "This is the gradient of the sum over tokens, not of the mean")
def gradient_of_the_sum(logits, targets, first):
    return Careless.apply(logits, targets, first, "sum")


@wrong("split_cross_entropy", "the one that is taken off at the target is missing")
def softmax_alone(logits, targets, first):
    return Careless.apply(logits, targets, first, "hit")


@wrong("split_cross_entropy", "This is exactly 2 times the right one")
def gradient_summed_again(logits, targets, first):
    return Careless.apply(logits, targets, first, "twice")


# ---- sequence_parallel_mlp -----------------------------------------------------------------------------------------


def gather(part):
    whole = part.new_empty(here()[1] * len(part), part.shape[1])
    dist.all_gather_single(whole, part.contiguous())
    return whole


def scatter(whole):
    part = whole.new_empty(len(whole) // here()[1], whole.shape[1])
    dist.reduce_scatter_single(part, whole.contiguous())
    return part


def piece(whole):
    rank, n = here()
    return whole.chunk(n)[rank]


def function(forward, backward):
    """A torch.autograd.Function made of two plain functions."""

    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return forward(x)

        @staticmethod
        def backward(ctx, gradient):
            return backward(gradient)

    return Made.apply


def layer(x, norm, up, down, enter=None, leave=None, replica=None):
    enter = enter or function(gather, scatter)
    leave = leave or function(scatter, gather)
    replica = replica or Enter.apply
    x = F.layer_norm(x, x.shape[-1:], replica(norm))
    return leave(F.linear(torch.relu(F.linear(enter(x), up)), down))


@wrong("sequence_parallel_mlp", "The norm's weight is a replica")
def norm_not_summed(x, norm, up, down):
    return layer(x, norm, up, down, replica=lambda weight: weight)


@wrong("sequence_parallel_mlp", "backward could gather once more")
def keeps_what_is_gathered(x, norm, up, down):
    return layer(x, norm, up, down)


@wrong("sequence_parallel_mlp", "Those are all tokens")
def all_tokens(x, norm, up, down):
    return layer(x, norm, up, down, leave=all_reduced)


@wrong("sequence_parallel_mlp", "An all-reduce is a reduce-scatter and an all-gather")
def all_reduce_then_cut(x, norm, up, down):
    return layer(x, norm, up, down, leave=function(lambda y: piece(summed(y)).clone(), gather))


@wrong("sequence_parallel_mlp", "nobody else's part was added")
def no_calls(x, norm, up, down):
    return layer(x, norm, up, down, enter=lambda x: x, leave=lambda y: y)


@wrong("sequence_parallel_mlp", "what was gathered was used by all ranks")
def cut_on_the_way_back(x, norm, up, down):
    return layer(x, norm, up, down, enter=function(gather, lambda gradient: piece(gradient).clone()))


def padded(gradient):
    whole = torch.zeros(here()[1] * len(gradient), gradient.shape[1])
    piece(whole).copy_(gradient)
    return whole


@wrong("sequence_parallel_mlp", "a reduce-scatter's backward gathers")
def not_gathered_on_the_way_back(x, norm, up, down):
    return layer(x, norm, up, down, leave=function(scatter, padded))


@wrong("sequence_parallel_mlp", "The norm is missing")
def no_norm(x, norm, up, down):
    y = F.linear(torch.relu(F.linear(function(gather, scatter)(x), up)), down)
    return function(scatter, gather)(y) + 0 * norm


@wrong("sequence_parallel_mlp", "Different tokens were added to each other")
def tokens_added(x, norm, up, down):
    return layer(x, norm, up, down, enter=Enter.apply, leave=all_reduced)


@wrong("sequence_parallel_mlp", "It is divided by the number of ranks: the parts")
def mean_of_the_parts(x, norm, up, down):
    return layer(x, norm, up, down, leave=function(lambda y: scatter(y) / here()[1], gather))


@wrong("sequence_parallel_mlp", "It is summed twice over ranks")
def norm_summed_twice(x, norm, up, down):
    return layer(
        x, norm, up, down, replica=lambda weight: function(lambda x: x.view_as(x), lambda g: here()[1] * summed(g))(weight)
    )


@wrong("sequence_parallel_mlp", "or a copy of what is there already")
def keeps_everything(x, norm, up, down):
    kept = function(gather, scatter)(F.layer_norm(x, x.shape[-1:], Enter.apply(norm)))
    y = F.linear(torch.relu(F.linear(kept, up).square().sqrt() * F.linear(kept, up).sign()), down)
    return function(scatter, gather)(y)
