"""Every kind of mistake of distributed programs ends in seconds, with the rank, the operation and the line."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lessons_lib import BufferMisuse, Deadlock, Mismatch, OrderWarning, RankFailed, run

QUICK = {"timeout": 30.0}  # far above what any of these takes: a test that reaches it fails by its message


def fails(program, error, *parts, ranks=4, **options):
    """The program fails with this kind of error; its message has all the parts and the name of this file."""
    with pytest.raises(error) as caught:
        run(program, ranks=ranks, **{**QUICK, **options})
    text = str(caught.value)
    for part in (*parts, "test_mistakes.py, line "):
        assert part in text, text
    assert "seconds" not in text  # it was proved, not timed out
    return text


# ---- tensors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["all_reduce", "broadcast", "isend", "irecv", "all_gather", "reduce_scatter"])
def test_a_tensor_that_is_not_contiguous_is_refused(spelling):
    def program():
        w = torch.arange(16.0).reshape(4, 4)
        v = w[:, dist.get_rank() % 2]
        other = dist.get_rank() ^ 1
        if spelling == "all_reduce":
            dist.all_reduce(v)
        elif spelling == "broadcast":
            dist.broadcast(v, src=1)
        elif spelling == "isend":
            dist.isend(v, other).wait()
        elif spelling == "irecv":
            dist.irecv(v, other).wait()
        elif spelling == "all_gather":
            dist.all_gather([torch.zeros(4) for _ in range(dist.get_world_size())], v)
        else:
            dist.reduce_scatter(v, [torch.zeros(4) for _ in range(dist.get_world_size())])

    text = fails(program, BufferMisuse, "not contiguous", f"dist.{spelling}", "strides [4]", ranks=2)
    assert "c = x.contiguous()" in text and "x.copy_(c)" in text


def test_nothing_moves_before_a_refusal():
    def program():
        w = torch.arange(16.0).reshape(4, 4)
        try:
            dist.all_reduce(w[:, 0])
        except BufferMisuse:
            pass
        return w

    for w in run(program, ranks=3, **QUICK).results:
        assert torch.equal(w, torch.arange(16.0).reshape(4, 4))


def test_sizes_differ():
    def program():
        n = 5 if dist.get_rank() == 1 else 8
        dist.all_reduce(torch.ones(n))

    fails(program, Mismatch, "rank 0", "rank 1", "[8] float32", "[5] float32", "dist.all_reduce(torch.ones(n))")


def test_sizes_differ_where_plain_gloo_would_finish():
    """A broadcast of 8 elements into a buffer of 8 of another dtype of the same width: bits are misread without an error."""

    def program():
        dtype = torch.int32 if dist.get_rank() == 2 else torch.float32
        dist.broadcast(torch.ones(8, dtype=dtype), src=0)

    fails(program, Mismatch, "rank 2", "int32", "float32")


def test_dtypes_differ():
    def program():
        dtype = torch.float64 if dist.get_rank() == 0 else torch.float32
        dist.all_reduce(torch.ones(8, dtype=dtype))

    fails(program, Mismatch, "different dtypes", "rank 0", "float64", "float32")


def test_roots_and_reductions_and_kinds_differ():
    def roots():
        dist.broadcast(torch.ones(8), src=dist.get_rank() % 2)

    def reductions():
        op = dist.ReduceOp.MAX if dist.get_rank() == 1 else dist.ReduceOp.SUM
        dist.all_reduce(torch.ones(8), op=op)

    def kinds():
        if dist.get_rank() == 1:
            dist.broadcast(torch.ones(8), src=0)
        else:
            dist.all_reduce(torch.ones(8))

    fails(roots, Mismatch, "different roots", "root rank 0", "root rank 1")
    fails(reductions, Mismatch, "different reductions", "SUM", "MAX")
    fails(kinds, Mismatch, "different collectives", "all_reduce", "broadcast")


@pytest.mark.parametrize("sent,expected", [((8,), (4,)), ((4,), (8,)), ((2, 3), (2, 4))])
def test_message_and_buffer_differ(sent, expected):
    def program():
        if dist.get_rank() == 0:
            dist.send(torch.ones(sent), 1)
        elif dist.get_rank() == 1:
            dist.recv(torch.ones(expected), 0)

    fails(program, Mismatch, "rank 0 sends", "rank 1 receives", f"{list(sent)} float32", f"{list(expected)} float32")


def test_message_and_buffer_differ_in_dtype():
    def program():
        if dist.get_rank() == 0:
            dist.send(torch.ones(4, dtype=torch.int32), 1)
        elif dist.get_rank() == 1:
            dist.recv(torch.ones(4), 0)

    fails(program, Mismatch, "int32", "float32", ranks=2)


def test_pieces_of_an_all_to_all_disagree():
    def program():
        rank, n = dist.get_rank(), dist.get_world_size()
        send = [1] * n
        receive = [2 if (rank, other) == (2, 0) else 1 for other in range(n)]
        dist.all_to_all_single(torch.zeros(sum(receive)), torch.ones(n), receive, send)

    fails(program, Mismatch, "rank 0", "sends 1 elements to rank 2", "expects 2 elements from rank 0", ranks=3)


# ---- waiting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("elements", [1, 1_000_000])
def test_both_send_first(elements):
    def program():
        other = 1 - dist.get_rank()
        dist.send(torch.ones(elements), other)
        dist.recv(torch.ones(elements), other)

    text = fails(
        program, Deadlock, "rank 0 waits in send", "rank 1 waits in send", "dist.send(torch.ones(elements), other)", ranks=2
    )
    assert "isend" in text and "even ranks" in text


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_a_circle_of_receives(ranks):
    def program():
        rank, n = dist.get_rank(), dist.get_world_size()
        dist.recv(torch.ones(1), (rank + 1) % n)

    fails(
        program, Deadlock, *[f"rank {r} waits in recv of 1 float32 from rank {(r + 1) % ranks}" for r in range(ranks)], ranks=ranks
    )


def test_a_message_is_never_received():
    def program():
        if dist.get_rank() == 0:
            handle = dist.isend(torch.ones(8), 1)
            handle.wait()

    fails(program, Deadlock, "rank 0 waits in send of 8 float32 to rank 1", "rank 1 has finished", "dist.isend(torch.ones(8), 1)")


def test_tags_that_do_not_meet():
    def program():
        if dist.get_rank() == 0:
            dist.send(torch.ones(8), 1, tag=3)
        else:
            dist.recv(torch.ones(8), 0, tag=4)

    fails(program, Deadlock, "rank 0 waits in send", "rank 1 waits in recv", ranks=2)


def test_a_collective_that_one_rank_leaves_out():
    def program():
        if dist.get_rank() != 2:
            dist.all_reduce(torch.ones(8))

    fails(program, Deadlock, "rank 0 waits in all_reduce", "rank 2 has finished")


def test_some_ranks_are_stuck_while_others_compute():
    def program():
        if dist.get_rank() < 2:
            dist.recv(torch.ones(1), 1 - dist.get_rank())
        else:
            time.sleep(60)

    fails(program, Deadlock, "rank 0 waits", "rank 1 waits")


def test_a_receive_from_anyone_that_nobody_serves():
    def program():
        if dist.get_rank() == 0:
            dist.recv(torch.ones(2))
            dist.recv(torch.ones(2))
        elif dist.get_rank() == 1:
            dist.send(torch.ones(2), 0)

    fails(program, Deadlock, "from any rank", ranks=3)


# ---- handles and buffers in flight ----------------------------------------------------------------------------------------


def in_flight(use):
    """Rank 0 starts something and uses its tensor before the wait; rank 1 is a correct partner."""

    def program():
        t = torch.ones(8)
        if dist.get_rank() == 0:
            use(t)
        else:
            dist.recv(t, 0) if use.__name__.startswith("send") else dist.send(t, 0)

    return program


def test_a_buffer_that_is_changed_while_it_is_sent():
    def send_then_fill(t):
        handle = dist.isend(t, 1)
        t.fill_(7)
        handle.wait()

    def send_then_view(t):
        handle = dist.isend(t, 1)
        t[2:4].data.mul_(2)
        handle.wait()

    def send_then_numpy(t):
        handle = dist.isend(t, 1)
        t.numpy()[0] = 7
        handle.wait()

    fails(in_flight(send_then_fill), BufferMisuse, "isend", "written by fill_", "t.fill_(7)", ranks=2)
    fails(in_flight(send_then_view), BufferMisuse, "written by mul_", "t[2:4].data.mul_(2)", ranks=2)
    fails(in_flight(send_then_numpy), BufferMisuse, "was changed between", ranks=2)


def test_a_buffer_that_is_used_before_it_arrived():
    def receive_then_read(t):
        handle = dist.irecv(t, 1)
        t.sum()
        handle.wait()

    def receive_then_write(t):
        handle = dist.irecv(t, 1)
        t.zero_()
        handle.wait()

    fails(in_flight(receive_then_read), BufferMisuse, "irecv", "read by sum", "t.sum()", ranks=2)
    fails(in_flight(receive_then_write), BufferMisuse, "written by zero_", "t.zero_()", ranks=2)


@pytest.mark.parametrize("reads", [print, lambda t: t.tolist(), str, "{0}".format])
def test_a_buffer_that_is_printed_or_listed_before_it_arrived(reads):
    """No operator of PyTorch runs there, so that it must be noticed in another way."""

    def receive_then_show(t):
        handle = dist.irecv(t, 1)
        reads(t)
        handle.wait()

    def send_then_show(t):
        handle = dist.isend(t, 1)
        reads(t)
        handle.wait()
        reads(t)

    fails(in_flight(receive_then_show), BufferMisuse, "irecv", "read by", ranks=2)
    run(in_flight(send_then_show), ranks=2, **QUICK)


@pytest.mark.parametrize("elements", [16_385, 20_000, 1_000_003])
def test_a_large_buffer_that_numpy_changes_while_it_is_sent(elements):
    """Samples of it are looked at: whatever changes all of it is seen."""

    def program(change):
        t = torch.ones(elements + 3)[3:]
        if dist.get_rank() == 0:
            handle = dist.isend(t, 1)
            if change:
                t.numpy()[:] += 1
            handle.wait()
        else:
            dist.recv(t, 0)
        return t.sum().item()

    with pytest.raises(BufferMisuse, match="was changed between"):
        run(program, True, ranks=2, **QUICK)
    assert run(program, False, ranks=2, **QUICK).results == [elements] * 2


def test_an_error_that_the_program_catches_is_over():
    """gloo cannot reduce float8: who catches that goes on, and is not told that a handle was dropped."""

    def program():
        x = torch.ones(3)
        try:
            dist.all_reduce(x.to(torch.float8_e4m3fn))
        except RuntimeError:
            dist.all_reduce(x)
        return x.tolist()

    assert run(program, ranks=2, **QUICK).results == [[2.0] * 3] * 2


def test_a_wait_with_a_time_limit_is_no_deadlock():
    def program():
        if dist.get_rank() == 0:
            handle = dist.irecv(torch.ones(2), 1)
            try:
                handle.wait(timedelta(seconds=0.5))
            except RuntimeError:
                return "not received"

    assert run(program, ranks=2, **QUICK).results == ["not received", None]


def test_an_asynchronous_collective_owns_its_tensor():
    def program():
        t = torch.ones(8)
        handle = dist.all_reduce(t, async_op=True)
        t += 1
        handle.wait()

    fails(program, BufferMisuse, "all_reduce", "written by add_", "t += 1", ranks=2)


def test_what_is_allowed_while_in_flight():
    """Reading what is sent, using other parts of the same storage, and anything after the wait."""

    def program():
        rank, other = dist.get_rank(), 1 - dist.get_rank()
        x = torch.arange(8.0) + 10 * rank
        send, receive = dist.isend(x[:4], other), dist.irecv(x[4:6], other, tag=1)
        total = x[:4].sum()
        x[6:] = 5
        y = torch.zeros(4)
        back = dist.irecv(y, other)
        out = dist.isend(x[6:].clone(), other, tag=1)
        for handle in (send, receive, back, out):
            handle.wait()
        x[:4] = 0
        return total.item(), x, y

    for rank, (total, x, y) in enumerate(run(program, ranks=2, **QUICK).results):
        assert total == 6 + 40 * rank
        assert torch.equal(x, torch.tensor([0, 0, 0, 0, 5, 5, 5, 5.0]))
        assert torch.equal(y, torch.arange(4.0) + 10 * (1 - rank))


def test_a_handle_that_is_dropped():
    def program():
        if dist.get_rank() == 0:
            for _ in range(3):
                dist.isend(torch.ones(8), 1)
        elif dist.get_rank() == 1:
            for _ in range(3):
                dist.recv(torch.ones(8), 0)

    fails(program, BufferMisuse, "threw away the handle of the isend", "dist.isend(torch.ones(8), 1)")


@pytest.mark.parametrize("attempt", range(3))
def test_who_dropped_a_handle_does_not_depend_on_who_was_first(attempt):
    def program():
        time.sleep(0.02 * ((dist.get_rank() + attempt) % 3))
        dist.all_reduce(torch.ones(8), async_op=True)
        dist.barrier()

    text = fails(program, BufferMisuse, ranks=3)
    assert text.startswith("Rank 0 threw away") and "ranks 1 and 2 failed in the same way" in text


def test_a_handle_that_is_kept_but_never_waited_for():
    def program():
        if dist.get_rank() == 0:
            program.handle = dist.isend(torch.ones(8), 1)
        elif dist.get_rank() == 1:
            dist.recv(torch.ones(8), 0)

    fails(program, BufferMisuse, "ended before it waited for the isend", ranks=2)


def test_polling_until_completed_counts_as_waiting():
    def program():
        t = torch.ones(4) * dist.get_rank()
        handle = dist.all_reduce(t, async_op=True)
        while not handle.is_completed():
            pass
        return t.sum().item()

    assert run(program, ranks=2, **QUICK).results == [4.0, 4.0]


# ---- order and groups -------------------------------------------------------------------------------------------------------


def test_two_collectives_in_different_order_are_warned_about():
    def program():
        a, b = torch.full((4,), 1.0), torch.full((4,), 10.0)
        if dist.get_rank() == 0:
            dist.all_reduce(a)
            dist.all_reduce(b)
        else:
            dist.all_reduce(b)
            dist.all_reduce(a)
        return a[0].item()

    with pytest.warns(OrderWarning, match="called from .*dist.all_reduce.a. on rank 0 and from .*dist.all_reduce.b. on rank 1"):
        recording = run(program, ranks=3, **QUICK)
    assert len(recording.warnings) == 2


def test_a_broadcast_from_two_branches_is_no_reason_to_warn(recwarn):
    def program():
        t = torch.ones(4)
        if dist.get_rank() == 0:
            dist.broadcast(t, src=0)
        else:
            dist.broadcast(t, 0)

    assert run(program, ranks=3, **QUICK).warnings == []


def test_swapped_broadcasts_are_warned_about():
    def program():
        a, b = torch.ones(4), torch.ones(4)
        if dist.get_rank() == 0:
            dist.broadcast(a, src=0)
            dist.broadcast(b, src=0)
        else:
            dist.broadcast(b, src=0)
            dist.broadcast(a, src=0)

    with pytest.warns(OrderWarning):
        run(program, ranks=2, **QUICK)


@pytest.mark.parametrize("later", [False, True])
def test_a_group_that_only_some_ranks_make(later):
    def program():
        if dist.get_rank() < 2:
            dist.new_group([0, 1])
        if later:
            dist.new_group([0, 1, 2, 3])

    fails(program, Mismatch, "Every rank must call new_group", "new_group([0, 1])")


def test_a_group_whose_member_never_makes_it():
    def program():
        if dist.get_rank() == 0:
            dist.new_group([0, 1])

    fails(program, Mismatch, "Every rank must call new_group", ranks=2)


# ---- ranks that fail ----------------------------------------------------------------------------------------------------------


def test_one_rank_raises():
    def program():
        if dist.get_rank() == 2:
            raise ValueError("no such shard")
        dist.barrier()

    text = fails(program, RankFailed, "rank 2", "ValueError: no such shard", 'raise ValueError("no such shard")')
    assert "Connection" not in text.split("ValueError")[0]


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_one_rank_dies(how):
    def program():
        if dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL) if how == "kill" else os._exit(3)
        dist.barrier()

    with pytest.raises(RankFailed) as caught:
        run(program, ranks=4, **QUICK)
    text = str(caught.value)
    assert "rank 2" in text and ("signal 9" in text if how == "kill" else "code 3" in text)


def test_an_endless_loop_names_its_line():
    def program():
        while dist.get_rank() == 1:
            pass

    with pytest.raises(RankFailed) as caught:
        run(program, ranks=2, timeout=1.0)
    assert "rank 1" in str(caught.value) and "while dist.get_rank() == 1" in str(caught.value)
