"""Plausible wrong answers to the exercises of lesson 01."""

import numpy as np
import torch
import torch.distributed as dist
from collecting import wrong

# ---- transfer_time -------------------------------------------------------------------------------------------------


@wrong("transfer_time", "a byte has 8 bits")
def bits_for_bytes(nbytes, gigabits, microseconds):
    return microseconds * 1e-6 + nbytes / (gigabits * 1e9)


@wrong("transfer_time", "powers of ten")
def binary_units(nbytes, gigabits, microseconds):
    return microseconds * 1e-6 + nbytes * 8 / (gigabits * 2**30)


@wrong("transfer_time", "pays the latency, too")
def no_latency(nbytes, gigabits, microseconds):
    return nbytes * 8 / (gigabits * 1e9)


@wrong("transfer_time", "adds microseconds to seconds")
def mixed_units(nbytes, gigabits, microseconds):
    return microseconds + nbytes * 8 / (gigabits * 1e9)


@wrong("transfer_time", "the same number whatever it is given")
def constant(nbytes, gigabits, microseconds):
    return 0.08


@wrong("transfer_time", "return seconds")
def in_microseconds(nbytes, gigabits, microseconds):
    return microseconds + nbytes * 8 / (gigabits * 1e3)


@wrong("transfer_time", "per direction")
def half_the_bandwidth(nbytes, gigabits, microseconds):
    return microseconds * 1e-6 + 2 * nbytes * 8 / (gigabits * 1e9)


@wrong("transfer_time", "Is the `return` missing?")
def only_printed(nbytes, gigabits, microseconds):
    print(microseconds * 1e-6 + nbytes * 8 / (gigabits * 1e9))


@wrong("transfer_time", "of type str")
def with_its_unit(nbytes, gigabits, microseconds):
    return f"{microseconds * 1e-6 + nbytes * 8 / (gigabits * 1e9)} s"


# ---- exchange ------------------------------------------------------------------------------------------------------


@wrong("exchange", "With 2 ranks:\nThese ranks wait for something that cannot come")
def both_send_first(mine, partner):
    theirs = torch.empty_like(mine)
    dist.send(mine, partner)
    dist.recv(theirs, partner)
    return theirs


@wrong("exchange", "With 4 ranks:\nThese ranks wait for something that cannot come")
def parity_of_the_rank(mine, partner):
    theirs = torch.empty_like(mine)
    if dist.get_rank() % 2 == 0:
        dist.send(mine, partner)
        dist.recv(theirs, partner)
    else:
        dist.recv(theirs, partner)
        dist.send(mine, partner)
    return theirs


@wrong("exchange", "These are its own numbers")
def returned_the_wrong_tensor(mine, partner):
    theirs = torch.empty_like(mine)
    sending = dist.isend(mine, partner)
    dist.recv(theirs, partner)
    sending.wait()
    return mine.clone()


@wrong("exchange", "changed its argument `mine`")
def received_into_mine(mine, partner):
    sending = dist.isend(mine.clone(), partner)
    dist.recv(mine, partner)
    sending.wait()
    return mine


@wrong("exchange", "dist.recv returns the rank that sent")
def returned_what_recv_returns(mine, partner):
    sending = dist.isend(mine, partner)
    source = dist.recv(torch.empty_like(mine), partner)
    sending.wait()
    return source


@wrong("exchange", "calls dist.all_gather")
def gathered(mine, partner):
    everything = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everything, mine)
    return everything[partner]


@wrong("exchange", "threw away the handle")
def dropped_the_handle(mine, partner):
    theirs = torch.empty_like(mine)
    dist.isend(mine, partner)
    dist.recv(theirs, partner)
    return theirs


@wrong("exchange", "expected was float32")
def buffer_of_another_dtype(mine, partner):
    theirs = torch.empty_like(mine)
    sending = dist.isend(mine, partner)
    dist.recv(theirs, partner)
    sending.wait()
    return theirs.double()


@wrong("exchange", "expected was int64")
def buffer_of_the_default_dtype(mine, partner):
    theirs = torch.empty_like(mine)
    sending = dist.isend(mine, partner)
    dist.recv(theirs, partner)
    sending.wait()
    return theirs.float()


@wrong("exchange", "2 times the bytes")
def sent_twice(mine, partner):
    theirs = torch.empty_like(mine)
    for _ in range(2):
        sending = dist.isend(mine, partner)
        dist.recv(theirs, partner)
        sending.wait()
    return theirs


@wrong("exchange", "This rank received nothing at all")
def ones_without_a_message(mine, partner):
    return torch.ones_like(mine)


# ---- running_total -------------------------------------------------------------------------------------------------


@wrong("running_total", "every other rank is wrong.\nThese are rank 1's own numbers")
def own_numbers(mine):
    return mine.clone()


@wrong("running_total", "the running total includes them")
def exclusive(mine):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    before = torch.zeros_like(mine)
    if rank > 0:
        dist.recv(before, rank - 1)
    if rank < last:
        dist.send(before + mine, rank + 1)
    return before if rank else mine.clone()


@wrong("running_total", "pass on the total, not what you were given")
def passed_on_its_own(mine):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    before = torch.zeros_like(mine)
    if rank < last:
        sending = dist.isend(mine, rank + 1)
    if rank > 0:
        dist.recv(before, rank - 1)
    if rank < last:
        sending.wait()
    return before + mine


@wrong("running_total", "total of all ranks")
def total_for_everybody(mine):
    rank, n = dist.get_rank(), dist.get_world_size()
    total, passing = mine.clone(), mine.clone()
    for _ in range(n - 1):
        incoming = torch.empty_like(mine)
        sending = dist.isend(passing, (rank + 1) % n)
        dist.recv(incoming, (rank - 1) % n)
        sending.wait()
        total, passing = total + incoming, incoming
    return total


@wrong("running_total", "One message to the next rank is enough")
def everybody_sends_to_all_later_ones(mine):
    rank, n = dist.get_rank(), dist.get_world_size()
    total = mine.clone()
    for earlier in range(rank):
        incoming = torch.empty_like(mine)
        dist.recv(incoming, earlier)
        total += incoming
    for later in range(rank + 1, n):
        dist.send(mine, later)
    return total


@wrong("running_total", "needs a recv from rank 3 on rank 0")
def closed_the_chain_to_a_ring(mine):
    rank, n = dist.get_rank(), dist.get_world_size()
    total = mine.clone()
    if rank > 0:
        before = torch.empty_like(mine)
        dist.recv(before, rank - 1)
        total += before
    dist.send(total, (rank + 1) % n)
    return total


@wrong("running_total", "changed its argument `mine`")
def added_into_mine(mine):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if rank > 0:
        before = torch.empty_like(mine)
        dist.recv(before, rank - 1)
        mine += before
    if rank < last:
        dist.send(mine, rank + 1)
    return mine


@wrong("running_total", "calls dist.all_gather")
def gathered_then_added(mine):
    everything = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everything, mine)
    return sum(everything[: dist.get_rank() + 1])


@wrong("running_total", "rank 2 waits in recv")
def knows_two_ranks_only(mine):
    total = mine.clone()
    if dist.get_rank() == 0:
        dist.send(mine, 1)
    else:
        before = torch.empty_like(mine)
        dist.recv(before, 0)
        total += before
    return total


# ---- fit -----------------------------------------------------------------------------------------------------------


def good_fit(sizes, seconds):
    n, t = np.array(sizes, dtype=float), np.array(seconds)
    latency, per_byte = np.linalg.lstsq(np.stack([1 / t, n / t], axis=1), np.ones(len(t)), rcond=None)[0]
    return latency, 1 / per_byte


@wrong("fit", "least absolute errors")
def straight_line(sizes, seconds):
    per_byte, latency = np.polyfit(sizes, seconds, 1)
    return latency, 1 / per_byte


@wrong("fit", "The two are swapped")
def swapped(sizes, seconds):
    return good_fit(sizes, seconds)[::-1]


@wrong("fit", "not in GB/s or MB/s")
def gigabytes(sizes, seconds):
    latency, bandwidth = good_fit(sizes, seconds)
    return latency, bandwidth / 1e9


@wrong("fit", "seconds per byte")
def slope(sizes, seconds):
    latency, bandwidth = good_fit(sizes, seconds)
    return latency, 1 / bandwidth


@wrong("fit", "1 us is 1e-6 s")
def microseconds(sizes, seconds):
    latency, bandwidth = good_fit(sizes, seconds)
    return 1e6 * latency, bandwidth


@wrong("fit", "whose time still contains the latency")
def largest_message(sizes, seconds):
    return np.mean(seconds[:5]), sizes[-1] / seconds[-1]


@wrong("fit", "Which messages tell you the latency?")
def mean_time_as_latency(sizes, seconds):
    return np.mean(seconds), good_fit(sizes, seconds)[1]


@wrong("fit", "Which messages tell you the bandwidth?")
def mean_rate_as_bandwidth(sizes, seconds):
    return good_fit(sizes, seconds)[0], np.mean(np.array(sizes) / np.array(seconds))


@wrong("fit", "should return two numbers")
def bandwidth_alone(sizes, seconds):
    return good_fit(sizes, seconds)[1]


# ---- multiply_while_sending ----------------------------------------------------------------------------------------


@wrong("multiply_while_sending", "nothing is computed while the messages move")
def one_after_the_other(block, weight, partner):
    incoming = torch.empty_like(block)
    sending = dist.isend(block, partner)
    dist.recv(incoming, partner)
    sending.wait()
    return block @ weight, incoming @ weight


@wrong("multiply_while_sending", "Both are the product of your own block")
def own_twice(block, weight, partner):
    return block @ weight, block @ weight


@wrong("multiply_while_sending", "The two are swapped")
def theirs_first(block, weight, partner):
    incoming = torch.empty_like(block)
    sending, receiving = dist.isend(block, partner), dist.irecv(incoming, partner)
    mine = block @ weight
    receiving.wait()
    sending.wait()
    return incoming @ weight, mine


@wrong("multiply_while_sending", "its product is computed where it arrives")
def sent_the_block_and_its_product(block, weight, partner):
    incoming, theirs = torch.empty_like(block), torch.empty_like(block)
    sending, receiving = dist.isend(block, partner), dist.irecv(incoming, partner)
    mine = block @ weight
    receiving.wait()
    sending.wait()
    sending = dist.isend(mine, partner)
    dist.recv(theirs, partner)
    sending.wait()
    return mine, theirs


@wrong("multiply_while_sending", "calls dist.all_gather")
def gathered_blocks(block, weight, partner):
    everything = [torch.empty_like(block) for _ in range(dist.get_world_size())]
    working = dist.all_gather(everything, block, async_op=True)
    mine = block @ weight
    working.wait()
    return mine, everything[partner] @ weight


@wrong("multiply_while_sending", "should return two tensors")
def one_tensor(block, weight, partner):
    return torch.cat(one_after_the_other(block, weight, partner))


@wrong("multiply_while_sending", "2.5 products; par is 2.2: only part")
def half_hidden(block, weight, partner):
    incoming = torch.empty_like(block)
    half = len(block) // 2
    first = block[:half] @ weight  # before anything has started
    sending, receiving = dist.isend(block, partner), dist.irecv(incoming, partner)
    second = block[half:] @ weight
    receiving.wait()
    sending.wait()
    return torch.cat([first, second]), incoming @ weight


# ---- relay ---------------------------------------------------------------------------------------------------------


def in_pieces(x, pieces, blocking):
    rank, last, sending = dist.get_rank(), dist.get_world_size() - 1, []
    for piece in pieces:
        if rank > 0:
            dist.recv(piece, rank - 1)
        if rank < last and blocking:
            dist.send(piece, rank + 1)
        elif rank < last:
            sending.append(dist.isend(piece, rank + 1))
    for handle in sending:
        handle.wait()
    return x


@wrong("relay", "until all of it has arrived")
def store_and_forward(x):
    return in_pieces(x, [x], blocking=True)


@wrong("relay", "while it still sends the last one")
def pieces_that_block(x):
    return in_pieces(x, x.tensor_split(16), blocking=True)


@wrong("relay", "With smaller ones the last rank starts sooner")
def too_few_pieces(x):
    return in_pieces(x, x.tensor_split(3), blocking=False)


@wrong("relay", "every one of them pays the latency")
def too_many_pieces(x):
    return in_pieces(x, x.tensor_split(150), blocking=False)


@wrong("relay", "does a last, shorter piece get lost?")
def forgot_the_remainder(x):
    size = len(x) // 16
    return in_pieces(x, [x[i * size : (i + 1) * size] for i in range(16)], blocking=False)


@wrong("relay", "in the chain it sends to rank 1 only")
def root_sends_to_all(x):
    if dist.get_rank() > 0:
        dist.recv(x, 0)
        return x
    for other in range(1, dist.get_world_size()):
        dist.send(x, other)
    return x


@wrong("relay", "calls dist.broadcast")
def one_line(x):
    dist.broadcast(x, 0)
    return x


@wrong("relay", "Is the `return` missing?")
def in_place_alone(x):
    in_pieces(x, x.tensor_split(16), blocking=False)


@wrong("relay", "nothing arrived in it")
def received_into_copies(x):
    in_pieces(x, [piece.clone() for piece in x.tensor_split(16)], blocking=False)
    return x
