"""The rules by which a throttled run delays messages, and runs that follow them."""

import itertools
import random

import torch
import torch.distributed as dist

from lessons_lib import Cluster, Link, measured, replay, run
from lessons_lib.hardware import LAPTOP
from lessons_lib.recorder.throttle import advance

FAST = Link(bandwidth=1e9, latency=1e-4)


def ends(transfers, until=1e9):
    """{key: end} of transfers (ready, key, ports, seconds), looked at once at the end."""
    state = {"posted": {}, "ready": [], "free": {}, "ended": {}}
    for n, (ready, key, ports, seconds) in enumerate(transfers):
        advance(state, ready)
        state["ready"].append((ready, (n, ""), key, ports, seconds))
    advance(state, until)
    return state["ended"]


def port(side, *ranks):
    return tuple((side, rank) for rank in ranks)


def test_shared_ports_serialise_and_both_directions_do_not():
    one, two, back = port("send", 0) + port("recv", 1), port("send", 0) + port("recv", 2), port("send", 1) + port("recv", 0)
    assert ends([(0.0, "a", one, 2.0), (0.0, "b", two, 3.0), (0.0, "c", back, 4.0)]) == {"a": 2.0, "b": 5.0, "c": 4.0}


def test_a_transfer_that_can_start_does_not_wait_for_one_that_cannot():
    busy = port("send", 2) + port("recv", 1)
    first, second = port("send", 0) + port("recv", 1), port("send", 0) + port("recv", 3)
    assert ends([(0.0, "busy", busy, 10.0), (1.0, "first", first, 1.0), (2.0, "second", second, 1.0)]) == {
        "busy": 10.0, "second": 3.0, "first": 11.0,
    }  # fmt: skip


def test_looking_more_often_changes_nothing():
    rng = random.Random(3)
    times = list(itertools.accumulate(rng.random() for _ in range(40)))
    transfers = []
    for n, ready in enumerate(times):
        a, b = rng.sample(range(4), 2)
        transfers.append((ready, n, port("send", a) + port("recv", b), 2 * rng.random()))
    once = ends(transfers)
    state = {"posted": {}, "ready": [], "free": {}, "ended": {}}
    for n, (ready, key, ports, seconds) in enumerate(transfers):
        for look in sorted(rng.uniform(times[n - 1] if n else 0, ready) for _ in range(3)):
            advance(state, look)
        advance(state, ready)
        state["ready"].append((ready, (n, ""), key, ports, seconds))
    advance(state, 1e9)
    assert state["ended"] == once and len(once) == 40


def program():
    rank, n = dist.get_rank(), dist.get_world_size()
    x, y = torch.full((25_000,), float(rank)), torch.zeros(25_000)
    for _ in range(3):
        handle = dist.isend(x, (rank + 1) % n)
        dist.recv(y, (rank - 1) % n)
        handle.wait()
    dist.all_reduce(x)
    later = dist.all_reduce(y, async_op=True)
    while not later.is_completed():
        pass
    return x[0].item(), y[0].item()


def test_a_throttled_run_gives_the_same_values_and_is_never_faster_than_its_link():
    link = Link(bandwidth=1e7, latency=5e-3)
    recording = run(program, ranks=3, throttle=link)
    assert recording.results == [(3.0, 3.0)] * 3
    virtual = replay(recording, Cluster(LAPTOP, nodes=1, devices_per_node=3, intra_node=link)).step_time
    assert virtual >= 3 * (5e-3 + 1e5 / 1e7)
    compute = sum(row[1] for row in measured(recording).breakdown()) / 3
    assert measured(recording).step_time >= virtual - compute - 1e-3  # the wall clock has this machine's computing in it


def test_a_receive_from_anyone_cannot_be_throttled():
    def anyone():
        if dist.get_rank() == 0:
            dist.recv(torch.zeros(2))
        else:
            dist.send(torch.zeros(2), 0)

    try:
        run(anyone, ranks=2, throttle=FAST)
    except Exception as error:
        assert "must name the rank it receives from" in str(error)
    else:
        raise AssertionError("it ran")
