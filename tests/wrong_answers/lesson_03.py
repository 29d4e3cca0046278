"""Plausible wrong answers to the exercises of lesson 03."""

import torch
import torch.distributed as dist
from collecting import wrong

from lessons_lib.parallel import data


def here():
    return dist.get_rank(), dist.get_world_size()


def summed(x):
    total = x.clone()
    dist.all_reduce(total)
    return total


def count(samples):
    return summed(torch.tensor(float(samples)))


# ---- average_by_count ----------------------------------------------------------------------------------------------


@wrong("average_by_count", "a rank with few samples counts as much as one with many")
def mean_of_means(gradient, samples):
    return summed(gradient) / here()[1]


@wrong("average_by_count", "neither weighted nor divided")
def sum_of_means(gradient, samples):
    return summed(gradient)


@wrong("average_by_count", "the sum is not divided by the number of all samples")
def not_divided(gradient, samples):
    return summed(gradient * samples)


@wrong("average_by_count", "divided by this rank's own samples")
def divided_by_own(gradient, samples):
    return summed(gradient * samples) / samples


@wrong("average_by_count", "as if every rank had as many samples as this one")
def as_if_equal(gradient, samples):
    return summed(gradient * samples) / (samples * here()[1])


@wrong("average_by_count", "divided by 2, the number of ranks")
def divided_by_ranks(gradient, samples):
    return summed(gradient * samples) / here()[1]


@wrong("average_by_count", "Is the `return` missing?")
def returns_the_call(gradient, samples):
    mean = gradient * samples / count(samples)
    return dist.all_reduce(mean)


@wrong("average_by_count", "changed its argument `gradient`")
def in_place(gradient, samples):
    gradient *= samples / count(samples)
    dist.all_reduce(gradient)
    return gradient


@wrong("average_by_count", "Gathered, everybody has everybody's gradient")
def gathered(gradient, samples):
    rows = [torch.empty(8) for _ in range(here()[1])]
    dist.all_gather(rows, torch.cat([gradient * samples, torch.tensor([float(samples)])]))
    total = sum(rows)
    return total[:-1] / total[-1]


@wrong("average_by_count", "The counts travelled as objects")
def counts_as_objects(gradient, samples):
    counts = [None] * here()[1]
    dist.all_gather_object(counts, samples)
    return summed(gradient * samples / sum(counts))


@wrong("average_by_count", "the sum over ranks is missing")
def weighted_alone(gradient, samples):
    return gradient * samples / count(samples)


@wrong("average_by_count", "nothing was combined with it")
def own(gradient, samples):
    return gradient.clone()


@wrong("average_by_count", "Does the result reach the others?")
def on_rank_0_only(gradient, samples):
    mean = summed(gradient * samples) / count(samples)
    return mean if here()[0] == 0 else torch.zeros_like(mean)


@wrong("average_by_count", "rounded to fewer digits")
def in_half_precision(gradient, samples):
    return summed((gradient * samples / count(samples)).bfloat16()).float()


# ---- adopt_best ----------------------------------------------------------------------------------------------------


def losses_of(loss):
    row = torch.zeros(here()[1])
    row[here()[0]] = loss
    return summed(row)


def everything(model):
    return [tensor.detach() for tensor in [*model.parameters(), *model.buffers()]]


def adopt(model, root, tensors=None):
    for tensor in everything(model) if tensors is None else tensors:
        dist.broadcast(tensor.detach(), root)


@wrong("adopt_best", "All ranks have rank 0's now; rank 1 has")
def from_rank_0(model, loss):
    adopt(model, 0)


@wrong("adopt_best", "whose loss is the highest")
def from_the_worst(model, loss):
    adopt(model, int(losses_of(loss).argmax()))


@wrong("adopt_best", "buffers belong to the model, too")
def parameters_only(model, loss):
    adopt(model, int(losses_of(loss).argmin()), list(model.parameters()))


@wrong("adopt_best", "a frozen parameter does not train, and still computes")
def trainable_only(model, loss):
    trained = [p for p in model.parameters() if p.requires_grad]
    adopt(model, int(losses_of(loss).argmin()), [*trained, *model.buffers()])


@wrong("adopt_best", "nobody ever had that one")
def mean_of_models(model, loss):
    for tensor in everything(model):
        tensor.copy_(summed(tensor.double()) / here()[1])


@wrong("adopt_best", "nothing was received into the model's own tensors")
def into_copies(model, loss):
    adopt(model, int(losses_of(loss).argmin()), [tensor.clone() for tensor in everything(model)])


@wrong("adopt_best", "Gathered, everybody has every model")
def gathers_models(model, loss):
    best = int(losses_of(loss).argmin())
    for tensor in everything(model):
        all_of_them = [torch.empty_like(tensor) for _ in range(here()[1])]
        dist.all_gather(all_of_them, tensor)
        tensor.copy_(all_of_them[best])


@wrong("adopt_best", "an object is sent with its pickle")
def as_an_object(model, loss):
    losses = [None] * here()[1]
    dist.all_gather_object(losses, loss)
    box = [model.state_dict()]
    dist.broadcast_object_list(box, losses.index(min(losses)))
    model.load_state_dict(box[0])


@wrong("adopt_best", "sends twice what a broadcast does")
def sum_with_zeros(model, loss):
    best = int(losses_of(loss).argmin())
    for tensor in everything(model):
        if here()[0] != best:
            tensor.zero_()
        dist.all_reduce(tensor)


@wrong("adopt_best", "have the same loss: the lower rank counts")
def the_last_of_equals(model, loss):
    losses = losses_of(loss).tolist()
    adopt(model, max(rank for rank in range(len(losses)) if losses[rank] == min(losses)))


@wrong("adopt_best", "name different roots for the same broadcast")
def its_own_idea(model, loss):
    adopt(model, here()[0])


# ---- average_in_one_call -------------------------------------------------------------------------------------------


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def gradient_of(p):
    return torch.zeros_like(p) if p.grad is None else p.grad


def hand_out(parameters, buffer):
    for p, piece in zip(parameters, buffer.split([p.numel() for p in parameters])):
        p.grad = piece.view_as(p).clone()


def one_buffer(parameters, samples):
    return torch.cat([*(gradient_of(p).reshape(-1) * samples for p in parameters), torch.tensor([float(samples)])])


@wrong("average_in_one_call", "a rank with few samples counts as much as one with many")
def means_of_means(model, samples):
    hand_out(trained(model), summed(torch.cat([gradient_of(p).reshape(-1) for p in trained(model)])) / here()[1])


@wrong("average_in_one_call", "lay all gradients into one buffer first")
def a_call_each(model, samples):
    total = count(samples)
    for p in trained(model):
        p.grad = summed(gradient_of(p) * samples) / total


@wrong("average_in_one_call", "A count is a number, too")
def two_calls(model, samples):
    buffer = one_buffer(trained(model), samples)[:-1]
    hand_out(trained(model), summed(buffer) / count(samples))


@wrong("average_in_one_call", "the sum is not divided by the number of all samples")
def undivided(model, samples):
    hand_out(trained(model), summed(one_buffer(trained(model), samples))[:-1])


@wrong("average_in_one_call", "A frozen parameter gets no gradient")
def frozen_too(model, samples):
    parameters = list(model.parameters())
    buffer = summed(one_buffer(parameters, samples))
    hand_out(parameters, buffer[:-1] / buffer[-1])


@wrong("average_in_one_call", "The gradients that train take 208 bytes")
def room_for_the_frozen(model, samples):
    parameters = list(model.parameters())
    buffer = summed(one_buffer(parameters, samples))
    hand_out(parameters, buffer[:-1] / buffer[-1])
    model.norm.bias.grad = None


@wrong("average_in_one_call", "bring different sizes to the same all_reduce")
def skips_those_without(model, samples):
    parameters = [p for p in trained(model) if p.grad is not None]
    buffer = summed(one_buffer(parameters, samples))
    hand_out(parameters, buffer[:-1] / buffer[-1])


@wrong("average_in_one_call", "This rank had no gradient for it")
def hands_nothing_to_those_without(model, samples):
    parameters = trained(model)
    buffer = summed(one_buffer(parameters, samples))
    had = [p.grad is not None for p in parameters]
    hand_out(parameters, buffer[:-1] / buffer[-1])
    for p, one in zip(parameters, had):
        p.grad = p.grad if one else None


@wrong("average_in_one_call", "finished code")
def borrowed(model, samples):
    total = torch.tensor(samples)
    dist.all_reduce(total)
    data.average_gradients_flat(model, samples / total.item())


# ---- average_over_microbatches -------------------------------------------------------------------------------------


def all_reduced(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)


@wrong("average_over_microbatches", "each of them is a mean already")
def losses_not_divided(model, microbatches, samples):
    for microbatch in microbatches:
        (model(microbatch) / here()[1]).backward()
    all_reduced(model)


@wrong("average_over_microbatches", "every microbatch counts as much as any other")
def each_counts_the_same(model, microbatches, samples):
    for microbatch in microbatches:
        (model(microbatch) / len(microbatches) / here()[1]).backward()
    all_reduced(model)


@wrong("average_over_microbatches", "nothing is divided")
def plain(model, microbatches, samples):
    for microbatch in microbatches:
        model(microbatch).backward()
    all_reduced(model)


def scaled(model, microbatch, samples):
    return model(microbatch) * (len(microbatch) / samples)


@wrong("average_over_microbatches", "Only the last microbatch is in it")
def zero_in_between(model, microbatches, samples):
    for microbatch in microbatches:
        model.zero_grad()
        scaled(model, microbatch, samples).backward()
    all_reduced(model)


@wrong("average_over_microbatches", "A hook that all-reduces p.grad does that")
def hooks_on_the_sum(model, microbatches, samples):
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    for microbatch in microbatches:
        scaled(model, microbatch, samples).backward()


@wrong("average_over_microbatches", "The gradients went round 2 times")
def hooks_on_each(model, microbatches, samples):
    for p in model.parameters():
        p.register_hook(summed)
    for microbatch in microbatches:
        scaled(model, microbatch, samples).backward()


@wrong("average_over_microbatches", "This is the rank's own microbatches alone")
def never_sent(model, microbatches, samples):
    for microbatch in microbatches:
        scaled(model, microbatch, samples).backward()


@wrong("average_over_microbatches", "rank 0 had 2 microbatches in memory at the same time")
def one_backward_for_all(model, microbatches, samples):
    sum(scaled(model, microbatch, samples) for microbatch in microbatches).backward()
    all_reduced(model)


@wrong("average_over_microbatches", "so ranks are summed")
def divided_twice(model, microbatches, samples):
    never_sent(model, microbatches, samples)
    all_reduced(model)
    for p in model.parameters():
        p.grad /= here()[1]


@wrong("average_over_microbatches", "so the ranks drift apart")
def sent_too_early(model, microbatches, samples):
    never_sent(model, microbatches[:-1], samples)
    if len(microbatches) > 1:
        all_reduced(model)
    scaled(model, microbatches[-1], samples).backward()


@wrong("average_over_microbatches", "between ranks it is a mean of means")
def mean_over_ranks(model, microbatches, samples):
    mine = sum(map(len, microbatches))
    for microbatch in microbatches:
        scaled(model, microbatch, mine * here()[1]).backward()
    all_reduced(model)


# ---- sharded_step --------------------------------------------------------------------------------------------------


def padded(x):
    return torch.cat([x, torch.zeros(-len(x) % here()[1])])


def scatter(gradient):
    rank, n = here()
    whole = padded(gradient)
    mine = torch.empty(len(whole) // n)
    dist.reduce_scatter_single(mine, whole)
    return mine


def clipped(mine, largest, norm=None):
    norm = summed(mine.square().sum()).sqrt() if norm is None else norm
    return mine * (largest / norm).clamp(max=1.0)


def gathered_weights(weights, momentum):
    rank, n = here()
    whole = padded(weights)
    piece = whole.chunk(n)[rank] - 0.25 * momentum
    dist.all_gather_single(whole, piece)
    return whole[: len(weights)]


def finish(weights, mine, momentum):
    momentum = 0.5 * momentum + mine
    return gathered_weights(weights, momentum), momentum


@wrong("sharded_step", "the mean over ranks was asked for")
def sum_of_gradients(weights, gradient, momentum, largest):
    return finish(weights, clipped(scatter(gradient), largest), momentum)


@wrong("sharded_step", "with this rank's own gradient")
def own_gradient(weights, gradient, momentum, largest):
    rank, n = here()
    return finish(weights, clipped(padded(gradient).chunk(n)[rank], largest, gradient.norm()), momentum)


@wrong("sharded_step", "by the norm of this rank's piece alone")
def norm_of_the_piece(weights, gradient, momentum, largest):
    mine = scatter(gradient) / here()[1]
    return finish(weights, clipped(mine, largest, mine.norm()), momentum)


@wrong("sharded_step", "squares add up, norms do not")
def sum_of_norms(weights, gradient, momentum, largest):
    mine = scatter(gradient) / here()[1]
    return finish(weights, clipped(mine, largest, summed(mine.norm())), momentum)


@wrong("sharded_step", "the root is missing")
def no_root(weights, gradient, momentum, largest):
    mine = scatter(gradient) / here()[1]
    return finish(weights, clipped(mine, largest, summed(mine.square().sum())), momentum)


@wrong("sharded_step", "before averaging")
def norm_before_averaging(weights, gradient, momentum, largest):
    return finish(weights, clipped(scatter(gradient) / here()[1], largest, gradient.norm()), momentum)


@wrong("sharded_step", "Nothing was clipped")
def not_clipped(weights, gradient, momentum, largest):
    return finish(weights, scatter(gradient) / here()[1], momentum)


@wrong("sharded_step", "The gradient was scaled up")
def scaled_up(weights, gradient, momentum, largest):
    mine = scatter(gradient) / here()[1]
    return finish(weights, mine * largest / summed(mine.square().sum()).sqrt(), momentum)


@wrong("sharded_step", "The momentum was clipped, too")
def momentum_clipped(weights, gradient, momentum, largest):
    mine = scatter(gradient) / here()[1]
    norm = summed(mine.square().sum()).sqrt()
    momentum = (0.5 * momentum + mine) * (largest / norm).clamp(max=1.0)
    return gathered_weights(weights, momentum), momentum


@wrong("sharded_step", "An all-reduce is a reduce-scatter and an all-gather")
def all_reduce_then_cut(weights, gradient, momentum, largest):
    rank, n = here()
    mine = summed(padded(gradient)).chunk(n)[rank] / n
    return finish(weights, clipped(mine, largest), momentum)


@wrong("sharded_step", "Those include the padding")
def padding_returned(weights, gradient, momentum, largest):
    mine = clipped(scatter(gradient) / here()[1], largest)
    weights, momentum = finish(padded(weights), mine, momentum)
    return weights, momentum


def all_momentum(momentum):
    whole = torch.empty(len(momentum) * here()[1])
    dist.all_gather_single(whole, momentum)
    return whole


@wrong("sharded_step", "each rank keeps its own piece alone")
def whole_momentum(weights, gradient, momentum, largest):
    weights, momentum = finish(weights, clipped(scatter(gradient) / here()[1], largest), momentum)
    return weights, all_momentum(momentum)


@wrong("sharded_step", "gather the new weights alone")
def momentum_gathered(weights, gradient, momentum, largest):
    momentum = 0.5 * momentum + clipped(scatter(gradient) / here()[1], largest)
    step = all_momentum(momentum)[: len(weights)]
    return gathered_weights(weights, momentum) * 0 + (weights - 0.25 * step), momentum


@wrong("sharded_step", "nothing was gathered from the other ranks")
def own_piece_only(weights, gradient, momentum, largest):
    rank, n = here()
    momentum = 0.5 * momentum + clipped(scatter(gradient) / n, largest)
    whole = padded(weights)
    whole.chunk(n)[rank].sub_(0.25 * momentum)
    return whole[: len(weights)], momentum


@wrong("sharded_step", "should return two tensors")
def weights_alone(weights, gradient, momentum, largest):
    return finish(weights, clipped(scatter(gradient) / here()[1], largest), momentum)[0]


@wrong("sharded_step", "The step goes uphill")
def uphill(weights, gradient, momentum, largest):
    momentum = 0.5 * momentum + clipped(scatter(gradient) / here()[1], largest)
    return gathered_weights(weights, -momentum), momentum


# ---- overlapped_backward -------------------------------------------------------------------------------------------


def start(parameters):
    buffer = torch.cat([p.grad.reshape(-1) for p in parameters])
    return parameters, buffer, dist.all_reduce(buffer, async_op=True)


def collect(flying, divide=True):
    for parameters, buffer, handle in flying:
        handle.wait()
        hand_out(parameters, buffer / here()[1] if divide else buffer)


def as_they_arrive(model, samples, most, divide=True, early=False):
    waiting, flying = [], []

    def arrived(p):
        waiting.append(p)
        if sum(q.numel() for q in waiting) >= most:
            if early:
                collect(flying, divide)
                flying.clear()
            flying.append(start(list(waiting)))
            waiting.clear()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(arrived)
    model(samples).backward()
    if waiting:
        flying.append(start(waiting))
    collect(flying, divide)


@wrong("overlapped_backward", "of which 1,473 us are exposed communication; par is 920 us.\nNo all-reduce starts")
def after_backward(model, samples):
    model(samples).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= here()[1]


@wrong("overlapped_backward", "Every all-reduce is waited for where it is called")
def blocking_hooks(model, samples):
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad.div_(here()[1])))
    model(samples).backward()


@wrong("overlapped_backward", "48 all-reduces pay 27 us of latency each")
def one_for_each_parameter(model, samples):
    as_they_arrive(model, samples, 1)


@wrong("overlapped_backward", "24 all-reduces pay 27 us of latency each")
def one_for_each_layer(model, samples):
    as_they_arrive(model, samples, 1024 * 1024)


@wrong("overlapped_backward", "a single buffer cannot leave earlier")
def one_for_all(model, samples):
    as_they_arrive(model, samples, 1e9)


def one_for_all_as_views(model, samples):
    """The same, and every gradient is a part of the buffer instead of a copy of it. Compared in test_exercises.py."""
    model(samples).backward()
    parameters = list(model.parameters())
    buffer = torch.cat([p.grad.reshape(-1) for p in parameters])
    dist.all_reduce(buffer)
    buffer /= here()[1]
    for p, piece in zip(parameters, buffer.split([p.numel() for p in parameters])):
        p.grad = piece.view_as(p)


@wrong("overlapped_backward", "how large should the last one be?")
def two_halves(model, samples):
    as_they_arrive(model, samples, 12 * 1024 * 1025)


@wrong(
    "overlapped_backward",
    "6 all-reduces (replayed), of which 230 us are exposed communication; par is 920 us.\nNo all-reduce starts",
)
def in_the_order_of_the_list(model, samples):
    parameters = list(model.parameters())[::-1]
    buckets = [parameters[first : first + 8] for first in range(0, len(parameters), 8)]
    there, flying = set(), []

    def arrived(p):
        there.add(p)
        while len(flying) < len(buckets) and there.issuperset(buckets[len(flying)]):
            flying.append(start(buckets[len(flying)]))

    for p in parameters:
        p.register_post_accumulate_grad_hook(arrived)
    model(samples).backward()
    collect(flying)


@wrong("overlapped_backward", "a second step with the same model fails")
def hooks_left_behind(model, samples):
    as_they_arrive(model, samples, 3_000_000)


@wrong("overlapped_backward", "A second step with the same model sends 100,761,600 bytes of gradients, the first sent 50,380,800")
def hooks_added_each_time(model, samples):
    model.waiting, flying = [], []

    def arrived(p):
        model.waiting.append(p)
        if sum(q.numel() for q in model.waiting) >= 3_000_000:
            model.flying.append(start(list(model.waiting)))
            model.waiting.clear()

    model.flying = flying
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(arrived)
    model(samples).backward()
    collect([*flying, start(model.waiting)] if model.waiting else flying)


@wrong("overlapped_backward", "This is the sum over ranks: the mean was asked for")
def summed_not_averaged(model, samples):
    as_they_arrive(model, samples, 3_000_000, divide=False)


@wrong("overlapped_backward", "never combined with what the other ranks have")
def not_sent(model, samples):
    model(samples).backward()


@wrong("overlapped_backward", "held up by a wait in the middle of it")
def waits_for_the_one_before(model, samples):
    as_they_arrive(model, samples, 1_500_000, early=True)


@wrong("overlapped_backward", "rounded to fewer digits")
def halved_on_the_way(model, samples):
    model(samples).backward()
    for p in model.parameters():
        p.grad = summed(p.grad.bfloat16()).float() / here()[1]


@wrong("overlapped_backward", "threw away the handle of the all_reduce")
def never_waits(model, samples):
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad, async_op=True) and None)
    model(samples).backward()
