"""Plausible wrong answers to the exercises of lesson 05."""

import math

import torch
import torch.distributed as dist
from collecting import wrong

from lessons_lib.parallel import schedules
from lessons_lib.parallel.pipeline import Microbatch, Stage, run_schedule


def here():
    return dist.get_rank(), dist.get_world_size()


# ---- three_by_four -------------------------------------------------------------------------------------------------


@wrong("three_by_four", "Rank 1 runs F0 at slot 0, but rank 0 finishes F0 at slot 1: the forward of a stage needs")
def all_ranks_at_once():
    return ["F0 F1 F2 F3 B0 B1 B2 B3"] * 3


@wrong("three_by_four", "Rank 0 runs B0 at slot 6, but rank 1 finishes B0 at slot 8: the backward of a stage needs the gradient")
def backward_from_the_wrong_end():
    return [
        "F0 F1 F2 F3 .  .  B0 B1 B2 B3 .  .",
        ".  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .",
        ".  .  F0 F1 F2 F3 .  .  B0 B1 B2 B3",
    ]


@wrong("three_by_four", "Rank 2 runs B0 at slot 2, but it finishes F0 at slot 4: a backward needs its own forward")
def backward_before_forward():
    return ["F0 F1 F2 F3 B0 B1 B2 B3", ". F0 F1 F2 F3 B1 B2 B3 B0", ". . B0 F0 F1 F2 F3 B1 B2 B3"]


@wrong("three_by_four", "Rank 1 never runs B3")
def one_is_missing():
    return [
        "F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3",
        ".  F0 F1 F2 F3 .  .  B0 B1 B2 .  .",
        ".  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .",
    ]


@wrong("three_by_four", "Rank 2 runs F2 2 times")
def one_is_there_twice():
    return [
        "F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3",
        ".  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .",
        ".  .  F0 F1 F2 F2 B0 B1 B2 B3 .  .",
    ]


@wrong("three_by_four", "Rank 0 runs F4, but there are 4 microbatches: the last is number 3")
def counted_from_one():
    return [
        "F1 F2 F3 F4 .  .  .  .  B1 B2 B3 B4",
        ".  F1 F2 F3 F4 .  .  B1 B2 B3 B4 .",
        ".  .  F1 F2 F3 F4 B1 B2 B3 B4 .  .",
    ]


@wrong("three_by_four", "but in 24 slots; 12 are enough.\nIn slot 1, rank 0 waits, although it could run F1 then.")
def everybody_waits():
    rows = [[], [], []]
    for i in range(4):
        for rank, before, between in ((0, 0, 4), (1, 1, 2), (2, 2, 0)):
            rows[rank] += ["."] * before + [f"F{i}"] + ["."] * between + [f"B{i}"] + ["."] * before
    return [" ".join(row) for row in rows]


@wrong("three_by_four", "but in 13 slots; 12 are enough.\nIn slot 9, rank 0 waits, although it could run B1 then.")
def one_slot_of_slack():
    return [
        "F0 F1 F2 F3 .  .  .  .  B0 .  B1 B2 B3",
        ".  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .  .",
        ".  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .  .",
    ]


@wrong("three_by_four", "In the row of rank 1 there is 0 (of type int): a slot is a text such as 'F3'")
def numbers_for_slots():
    return [["F0", "F1"], [0, "F0", "F1"], [0, 0, "F0"]]


@wrong("three_by_four", "'G0' is not an action")
def unknown_letter():
    return ["F0 F1 F2 F3 G0", ". F0 F1 F2 F3", ". . F0 F1 F2 F3"]


@wrong("three_by_four", "this schedule does not split backward")
def split_though_not_asked():
    return [
        "F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3 W0 W1 W2 W3",
        ".  F0 F1 F2 F3 .  .  B0 B1 B2 B3 W0 W1 W2 W3 .",
        ".  .  F0 F1 F2 F3 B0 B1 B2 B3 W0 W1 W2 W3 .  .",
    ]


@wrong("three_by_four", "has 2 rows, and there are 3 ranks")
def a_row_is_missing():
    return ["F0 F1 F2 F3 B0 B1 B2 B3", ". F0 F1 F2 F3 B0 B1 B2 B3"]


@wrong("three_by_four", "Is the `return` missing?")
def not_returned():
    ["F0 F1 F2 F3", ". F0 F1 F2 F3", ". . F0 F1 F2 F3"]  # noqa: B018


@wrong("three_by_four", "the row of rank 1 is 7 (of type int)")
def no_texts():
    return ["F0 F1 F2 F3", 7, None]


@wrong("three_by_four", "The row of rank 0 has 100,000 words")
def far_too_long():
    return ["F0 " * 100_000, "F0", "F0"]


# ---- microbatches_needed -------------------------------------------------------------------------------------------


def exact(p, most_idle):
    return (p - 1) * (1 - most_idle) / most_idle


@wrong("microbatches_needed", "keeps the overhead over ideal, (p-1)/m, that small")
def the_other_definition(p, most_idle):
    return max(1, math.ceil((p - 1) / most_idle))


@wrong("microbatches_needed", "counts p idle slots")
def p_in_place_of_p_minus_1(p, most_idle):
    return max(1, math.ceil(p * (1 - most_idle) / most_idle))


@wrong("microbatches_needed", "That is rounded down")
def rounded_down(p, most_idle):
    return max(1, int(exact(p, most_idle)))


@wrong("microbatches_needed", "there one less is enough")
def one_too_many(p, most_idle):
    return int(exact(p, most_idle)) + 1


@wrong("microbatches_needed", "That is rounded to the nearest")
def nearest(p, most_idle):
    return max(1, round(exact(p, most_idle)))


@wrong("microbatches_needed", "That is upside down")
def upside_down(p, most_idle):
    return max(1, math.ceil((p - 1) * most_idle / (1 - most_idle)))


@wrong("microbatches_needed", "half a microbatch does not exist")
def not_rounded(p, most_idle):
    return max(1, exact(p, most_idle))


@wrong("microbatches_needed", "Without any microbatch nothing is trained")
def none_at_all(p, most_idle):
    return math.ceil(exact(p, most_idle))


@wrong("microbatches_needed", "the same number whatever it is given")
def constant(p, most_idle):
    return 8


@wrong("microbatches_needed", "should return a whole number. Is the `return` missing?")
def only_printed(p, most_idle):
    print(math.ceil(exact(p, most_idle)))


# ---- order_of_rank -------------------------------------------------------------------------------------------------


def taking_turns(warm_up, m, turn="FB"):
    order = [f"F{i}" for i in range(warm_up)]
    for i in range(m - warm_up):
        order += [f"F{warm_up + i}", f"B{i}"] if turn == "FB" else [f"B{i}", f"F{warm_up + i}"]
    return " ".join(order + [f"B{i}" for i in range(max(m - warm_up, 0), m)])


@wrong("order_of_rank", "on every rank: that is GPipe, which holds all 8")
def gpipe(rank, p, m):
    return taking_turns(m, m)


@wrong("order_of_rank", "on every rank alike")
def same_warm_up_everywhere(rank, p, m):
    return taking_turns(min(p - 1, m), m)


@wrong("order_of_rank", "counted from the wrong end")
def mirrored(rank, p, m):
    return taking_turns(min(rank, m), m)


@wrong("order_of_rank", "one more than it needs, so one more is in flight")
def one_forward_more(rank, p, m):
    return taking_turns(min(p - rank, m), m)


@wrong("order_of_rank", "one too few")
def backward_first(rank, p, m):
    return taking_turns(min(p - 1 - rank, m), m, turn="BF")


@wrong("order_of_rank", "order_of_rank(0, 4, 2) returned F0 F1 F2 B0 B1.\nRank 0 runs F2, but there are 2 microbatches")
def warm_up_without_limit(rank, p, m):
    return taking_turns(p - 1 - rank, m)


@wrong("order_of_rank", "Rank 0 never runs B5, B6, B7")
def no_cool_down(rank, p, m):
    warm_up = min(p - 1 - rank, m)
    return taking_turns(warm_up, m).split()[: 2 * m - warm_up]


@wrong("order_of_rank", "backwards run in the same order")
def last_in_first_out(rank, p, m):
    warm_up = min(p - 1 - rank, m)
    order = taking_turns(warm_up, m).split()
    return order[: 2 * m - warm_up - 1] + order[2 * m - warm_up - 1 :][::-1]


@wrong("order_of_rank", "After it a forward and a backward take turns")
def in_pairs(rank, p, m):
    warm_up = min(p - rank, m)
    order, rest = [f"F{i}" for i in range(warm_up)], [f"F{i}" for i in range(warm_up, m)]
    for i in range(0, m, 2):
        order += [f"B{j}" for j in (i, i + 1) if j < m] + rest[:2]
        rest = rest[2:]
    return order


@wrong("order_of_rank", 'should return an order such as "F0 F1 B0 B1". Is the `return` missing?')
def order_not_returned(rank, p, m):
    taking_turns(min(p - 1 - rank, m), m)


@wrong("order_of_rank", "'f0' is not an action")
def small_letters(rank, p, m):
    return taking_turns(min(p - 1 - rank, m), m).lower()


@wrong("order_of_rank", "there is 0 (of type int)")
def bare_numbers(rank, p, m):
    return list(range(2 * m))


# ---- sum_tied ------------------------------------------------------------------------------------------------------


def is_end(stage):
    return stage.table is not None


@wrong("sum_tied", "the two copies drift apart, for each takes another step")
def nothing_at_all(stage):
    pass


@wrong("sum_tied", "This is the mean. A weight that is used twice gets the sum")
def mean(stage):
    rank, n = here()
    ends = dist.new_group([0, n - 1]) if n > 1 else None
    if ends and is_end(stage):
        dist.all_reduce(stage.table.grad, group=ends)
        stage.table.grad /= 2


@wrong("sum_tied", "did not. Every rank must call new_group")
def group_made_by_its_members(stage):
    rank, n = here()
    if is_end(stage) and n > 1:
        dist.all_reduce(stage.table.grad, group=dist.new_group([0, n - 1]))


@wrong("sum_tied", "'NoneType' object has no attribute 'grad'")
def every_rank(stage):
    dist.all_reduce(stage.table.grad)


@wrong("sum_tied", "rank 1 called all_reduce (96 bytes).\nIt has no copy of the table")
def zeros_in_between(stage):
    rank, n = here()
    gradient = stage.table.grad if is_end(stage) else torch.zeros(6, 4)
    dist.all_reduce(gradient)


@wrong("sum_tied", "One rank holds both ends: there is one table")
def doubled_on_one_rank(stage):
    rank, n = here()
    other = n - 1 - rank
    ends = dist.new_group([0, n - 1]) if n > 1 else None
    if n == 1:
        stage.table.grad += stage.table.grad
    elif is_end(stage) and other != rank:
        dist.all_reduce(stage.table.grad, group=ends)


@wrong("sum_tied", "With one rank the first and the last are the same: there is nobody to sum with.")
def group_of_one_rank_twice(stage):
    rank, n = here()
    ends = dist.new_group([0, n - 1])
    if is_end(stage):
        dist.all_reduce(stage.table.grad, group=ends)


@wrong("sum_tied", "your function changed the weight table")
def weights_in_place_of_gradients(stage):
    rank, n = here()
    if n > 1:
        ends = dist.new_group([0, n - 1])
        if is_end(stage):
            dist.all_reduce(stage.table.detach(), group=ends)


@wrong("sum_tied", "and the other end has got it, too: it replaced the other one")
def broadcast(stage):
    rank, n = here()
    if n > 1:
        ends = dist.new_group([0, n - 1])
        if is_end(stage):
            dist.broadcast(stage.table.grad, src=0, group=ends)


@wrong("sum_tied", "is not tied: every stage has its own")
def every_gradient(stage):
    rank, n = here()
    if n > 1:
        ends = dist.new_group([0, n - 1])
        if is_end(stage):
            for parameter in stage.parameters():
                dist.all_reduce(parameter.grad, group=ends)


@wrong("sum_tied", "These ranks wait for something that cannot come")
def both_send_first(stage):
    rank, n = here()
    if is_end(stage) and n > 1:
        other = torch.empty_like(stage.table.grad)
        dist.send(stage.table.grad, n - 1 - rank)
        dist.recv(other, n - 1 - rank)
        stage.table.grad += other


@wrong("sum_tied", "The other end has the sum, this one still its own gradient")
def only_on_the_last(stage):
    rank, n = here()
    if n > 1 and rank == 0:
        dist.send(stage.table.grad, n - 1)
    elif n > 1 and rank == n - 1:
        other = torch.empty_like(stage.table.grad)
        dist.recv(other, 0)
        stage.table.grad += other


@wrong("sum_tied", "rank 0 sent 192 bytes; 96 are enough")
def table_travels_too(stage):
    rank, n = here()
    if n > 1:
        ends = dist.new_group([0, n - 1])
        if is_end(stage):
            both = torch.cat([stage.table.grad, stage.table.detach()])
            dist.all_reduce(both, group=ends)
            stage.table.grad.copy_(both[:6])


# ---- balance -------------------------------------------------------------------------------------------------------


def even_cut(costs, p):
    each, extra = divmod(len(costs), p)
    return [each + (stage < extra) for stage in range(p)]


def by_mean(costs, p, full):
    mean, counts, total = sum(costs) / p, [0], 0
    for n, cost in enumerate(costs):
        left, stages = len(costs) - n, p - len(counts)
        if counts[-1] and stages and (full(total, cost, mean) or left <= stages):
            counts.append(0)
            total = 0
        counts[-1] += 1
        total += cost
    return counts


@wrong("balance", "That is the same number of layers for each")
def same_number_of_layers(costs, p):
    return even_cut(costs, p)


@wrong("balance", "That fills each stage up to the mean")
def up_to_the_mean(costs, p):
    return by_mean(costs, p, lambda total, cost, mean: total >= mean)


@wrong("balance", "That stops before each stage gets above the mean")
def below_the_mean(costs, p):
    return by_mean(costs, p, lambda total, cost, mean: total + cost > mean)


@wrong("balance", "These are the ends of the stages")
def ends_of_the_stages(costs, p):
    counts = even_cut(costs, p)
    return [sum(counts[: stage + 1]) for stage in range(p)]


@wrong("balance", "These are the costs of the stages")
def costs_of_the_stages(costs, p):
    counts, ends = even_cut(costs, p), ends_of_the_stages(costs, p)
    return [sum(costs[end - n : end]) for n, end in zip(counts, ends)]


@wrong("balance", "here every stage has at least one")
def all_on_the_first(costs, p):
    return [len(costs)] + [0] * (p - 1)


@wrong("balance", "for stage 0, and should return how many layers it has")
def lists_of_layers(costs, p):
    counts, ends = even_cut(costs, p), ends_of_the_stages(costs, p)
    return [costs[end - n : end] for n, end in zip(counts, ends)]


@wrong("balance", "1 layer would be on no stage")
def the_rest_is_lost(costs, p):
    return [max(1, (len(costs) - 1) // p)] * p


@wrong("balance", "returned 1 number, and there are 3 stages")
def one_number(costs, p):
    return [max(costs)] if p > 1 else [len(costs)]


@wrong("balance", "how many layers each stage has. Is the `return` missing?")
def balance_not_returned(costs, p):
    even_cut(costs, p)


# ---- run_order -----------------------------------------------------------------------------------------------------


def mean_loss(y, target):
    return (y - target).square().mean() / 2


def receive(like, source, buffers):
    """Into a fresh buffer; or into the first of this shape, again and again."""
    buffer = torch.empty_like(like)
    if buffers is not None:
        buffer = buffers.setdefault(tuple(like.shape), buffer)
    dist.recv(buffer, source)
    return buffer


def pipeline(
    order, stage, inputs, targets, share=None, buffers=None, loss=lambda losses: sum(losses), each=None, send=dist.isend,
    follow=True,
):  # fmt: skip
    """Right, but for what is said otherwise."""
    rank, p = here()
    samples, kept, sent, losses = sum(map(len, inputs)), {}, [], []
    for kind, i in ((one[0], int(one[1:])) for one in order):
        if kind == "F":
            x = inputs[i] if rank == 0 else receive(inputs[i], rank - 1, buffers).detach().requires_grad_(follow)
            y = stage(x)
            if rank < p - 1:
                sent.append(send(y.detach(), rank + 1))
            else:
                y = mean_loss(y, targets[i]) * (len(x) / samples if share is None else share(i, inputs))
                losses.append(y.item())
            kept[i] = x, y
        else:
            x, y = kept.pop(i)
            y.backward(receive(y, rank + 1, None) if rank < p - 1 else None)
            if rank > 0:
                sent.append(send(x.grad, rank - 1))
            if each:
                each(stage)
    for handle in sent:
        if handle is not None:
            handle.wait()
    return loss(losses) if losses else None


@wrong("run_order", "should be [1.5]; it is [3].\nThis is the sum of the microbatches' gradients")
def loss_not_divided(order, stage, inputs, targets):
    return pipeline(order, stage, inputs, targets, share=lambda i, inputs: 1)


@wrong("run_order", "The last one is smaller: it should count by its samples")
def every_microbatch_alike(order, stage, inputs, targets):
    return pipeline(order, stage, inputs, targets, share=lambda i, inputs: 1 / len(inputs))


@wrong("run_order", "divided by the number of microbatches once more")
def divided_twice(order, stage, inputs, targets):
    samples = sum(map(len, inputs))
    return pipeline(order, stage, inputs, targets, share=lambda i, inputs: len(inputs[i]) / samples / len(inputs))


@wrong("run_order", "With 2 ranks:\nThese ranks wait for something that cannot come")
def blocking_sends(order, stage, inputs, targets):
    return pipeline(order, stage, inputs, targets, send=lambda x, rank: dist.send(x, rank))


@wrong("run_order", "This is the last microbatch's gradient alone")
def gradient_set_to_zero(order, stage, inputs, targets):
    backwards = iter(range(len(inputs)))
    last = len(inputs) - 1
    return pipeline(order, stage, inputs, targets, each=lambda stage: next(backwards) < last and stage.zero_grad())


@wrong("run_order", "Every backward used the x that came last")
def one_buffer(order, stage, inputs, targets):
    return pipeline(order, stage, inputs, targets, buffers={})


@wrong("run_order", "ran F0 F1 B0 B1; its order was F0 B0 F1 B1")
def always_gpipe(order, stage, inputs, targets):
    m = len(inputs)
    return pipeline([f"F{i}" for i in range(m)] + [f"B{i}" for i in range(m)], stage, inputs, targets)


@wrong("run_order", "That is the sum of the microbatches' mean losses")
def sum_of_losses(order, stage, inputs, targets):
    samples = sum(map(len, inputs))
    return pipeline(
        order, stage, inputs, targets,
        loss=lambda losses: sum(one * samples / len(x) for one, x in zip(losses, inputs)),
    )  # fmt: skip


@wrong("run_order", "returned None (of type NoneType), and should return the mean loss over the batch. Is the `return`")
def loss_not_returned(order, stage, inputs, targets):
    pipeline(order, stage, inputs, targets)


@wrong("run_order", "there is none.\nDid backward reach it")
def never_backward(order, stage, inputs, targets):
    pipeline([one for one in order if one[0] == "F"], stage, inputs, targets)
    return 0.0


@wrong("run_order", "threw away the handle of the isend")
def handles_dropped(order, stage, inputs, targets):
    return pipeline(order, stage, inputs, targets, send=lambda x, rank: dist.isend(x, rank) and None)


@wrong("run_order", "your function changed the weights")
def steps_after_each(order, stage, inputs, targets):
    def step(stage):
        with torch.no_grad():
            for parameter in stage.parameters():
                parameter -= 0.1 * parameter.grad

    return pipeline(order, stage, inputs, targets, each=step)


@wrong("run_order", "The messages come from the course's finished code")
def library(order, stage, inputs, targets):
    rank, p = here()
    one = Stage([stage], rank, p, torch.empty_like)
    microbatches = [Microbatch(i, x, y, len(x) / sum(map(len, inputs))) for i, (x, y) in enumerate(zip(inputs, targets))]
    orders = (
        [order] * p if p == 1 else getattr(schedules, "gpipe" if order[1][0] == "F" and p == 3 else "one_f_one_b")(p, len(inputs))
    )
    loss = run_schedule(one, orders, microbatches, mean_loss)
    return None if loss is None else loss.item()


@wrong("run_order", "which autograd does not follow, so x.grad stays None. Let x require a gradient")
def x_without_a_gradient(order, stage, inputs, targets):
    return pipeline(order, stage, inputs, targets, follow=False)


@wrong("run_order", "Everywhere else backward needs the gradient of what this rank sent: the next rank sends it back")
def backward_without_a_gradient(order, stage, inputs, targets):
    (rank, p), kept, sent, total = here(), {}, [], 0.0
    for kind, i in ((one[0], int(one[1:])) for one in order):
        if kind == "F":
            x = inputs[i] if rank == 0 else receive(inputs[i], rank - 1, None).requires_grad_()
            kept[i] = stage(x)
            if rank < p - 1:
                sent.append(dist.isend(kept[i].detach(), rank + 1))
            else:
                kept[i] = mean_loss(kept[i], targets[i]) * len(x) / sum(map(len, inputs))
                total += kept[i].item()
        else:
            kept.pop(i).backward()
    for handle in sent:
        handle.wait()
    return total


# ---- within_memory -------------------------------------------------------------------------------------------------


def shifted(p, m, in_flight, split):
    """1F1B with a warm-up that keeps to the limit; W as late as it may be."""
    orders = []
    for rank in range(p):
        ahead = min(p - 1 - rank, in_flight - 1)
        late = min(rank, in_flight - 1 - ahead)
        order = [f"F{i}" for i in range(min(ahead, m))]
        for i in range(m):
            order += [f"F{i + ahead}"] * (i + ahead < m) + [f"B{i}"] + [f"W{i - late}"] * (split and i >= late)
        orders.append(order + [f"W{i}" for i in range(max(m - late, 0), m) if split])
    return orders


def halves(order):
    """Every B followed by its W."""
    return [one for whole in order for one in ([whole, f"W{whole[1:]}"] if whole[0] == "B" else [whole])]


def known(p, m, make):
    return [[str(one) for one in order] for order in make(p, m)]


@wrong("within_memory", "That is GPipe, which heeds no limit")
def always_gpipe_orders(p, m, in_flight, split):
    return known(p, m, schedules.gpipe)


@wrong("within_memory", "That is 1F1B, which heeds no limit")
def always_1f1b(p, m, in_flight, split):
    orders = known(p, m, schedules.one_f_one_b)
    return [halves(order) for order in orders] if split else orders


@wrong("within_memory", "One microbatch after the other, as if only one could be kept")
def one_at_a_time(p, m, in_flight, split):
    return [[f"{kind}{i}" for i in range(m) for kind in ("FBW" if split else "FB")] for _ in range(p)]


@wrong("within_memory", "In slot 8, rank 1 waits, although it could run B1 then")
def shorter_warm_up(p, m, in_flight, split):
    return shifted(p, m, in_flight, split)


@wrong("within_memory", "in 33 slots; par is 32.\nNo rank waits while it could do something")
def whatever_is_ready(p, m, in_flight, split):
    return known(p, m, lambda p, m: schedules.greedy(p, m, in_flight, split, backward=2 - split))


@wrong("within_memory", "Every W follows its B at once, as if backward were not split")
def never_really_split(p, m, in_flight, split):
    orders = known(p, m, lambda p, m: schedules.greedy(p, m, in_flight, backward=2))
    return [halves(order) for order in orders] if split else orders


@wrong("within_memory", "a microbatch is kept until then")
def kept_until_b(p, m, in_flight, split):
    orders = known(p, m, lambda p, m: schedules.greedy(p, m, in_flight, backward=2))
    return [order + [f"W{i}" for i in range(m)] for order in orders] if split else orders


@wrong("within_memory", "Every W comes at the very end")
def w_at_the_end_if_there_is_room(p, m, in_flight, split):
    orders = known(p, m, lambda p, m: schedules.greedy(p, m, in_flight, split, backward=2 - split))
    if not split or in_flight < m:
        return orders
    return [[one for one in order if one[0] != "W"] + [f"W{i}" for i in range(m)] for order in orders]


@wrong("within_memory", "The orders of within_memory(3, 7, 3, True) cannot run. Rank 0 never runs W0")
def no_w(p, m, in_flight, split):
    return known(p, m, lambda p, m: schedules.greedy(p, m, in_flight, backward=2))


@wrong("within_memory", "this schedule does not split backward")
def always_w(p, m, in_flight, split):
    return known(p, m, lambda p, m: schedules.greedy(p, m, in_flight, True))


@wrong("within_memory", "These orders wait for each other for ever")
def each_rank_in_another_order(p, m, in_flight, split):
    orders = one_at_a_time(p, m, in_flight, split)
    return [order if rank == 0 else one_at_a_time(p, m, in_flight, split)[0][::-1] for rank, order in enumerate(orders)]


@wrong("within_memory", "returned 1 order, and there are 2 ranks")
def one_order_for_all(p, m, in_flight, split):
    return one_at_a_time(p, m, in_flight, split)[:1]


@wrong("within_memory", "an order for each rank. Is the `return` missing?")
def memory_not_returned(p, m, in_flight, split):
    shifted(p, m, in_flight, split)


@wrong("within_memory", "an action is a text such as 'F3'")
def garbage(p, m, in_flight, split):
    return [[None, {}, 3.5]] * p
