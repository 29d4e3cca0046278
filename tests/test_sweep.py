"""A sweep gives, to the last bit, what replay gives at each bandwidth."""

import dataclasses
import random

import numpy as np
import pytest
from recordings import random_program

from lessons_lib.errors import Deadlock
from lessons_lib.hardware import H100, NVLINK4, Cluster, Device, Link
from lessons_lib.recording import RankLog, Recording
from lessons_lib.replay import lanes, replay, sweep, sweeping

DEVICE = Device(1e9, 1e9, 1e9, 1.0)


def one_by_one(recording, cluster, link, bandwidths, latency=None, algorithm="ring"):
    out = []
    for bandwidth in bandwidths:
        setting = cluster
        for name in ("intra_node", "inter_node"):
            if link in (name, "both"):
                old = getattr(setting, name)
                new = Link(bandwidth, old.latency if latency is None else latency)
                setting = dataclasses.replace(setting, **{name: new})
        out.append(replay(recording, setting, algorithm).step_time)
    return out


@pytest.mark.parametrize("seed", range(120))
def test_random_programs_with_contention(seed, monkeypatch):
    rng = random.Random(seed)
    monkeypatch.setattr(lanes, "BLOCK_SIZE", rng.choice([1, 1, 64]))  # 1: every array is used again at once
    ties = rng.random() < 0.4
    ranks = rng.randrange(1, 7)
    recording = random_program(rng, ranks, rng.choice([5, 20, 60, 150, 300]), ties)
    intra, inter = Link(1000, rng.choice([0, 0.25]) if ties else rng.random() / 2), Link(700, rng.random())
    cluster = Cluster(DEVICE, 6, rng.choice([1, 2, 3, 8]), intra, inter)
    link, latency, algorithm = rng.choice(sweeping.LINKS), rng.choice([None, 0, 0.3]), rng.choice(["ring", "tree"])
    bandwidths = np.geomspace(50, 50_000, 25)
    rng.shuffle(bandwidths)
    if rng.random() < 0.5:
        replay(recording, dataclasses.replace(cluster, devices_per_node=4))  # leaves an order behind that may not hold
    found = sweep(recording, cluster, link, bandwidths, latency, algorithm)
    assert found.tolist() == one_by_one(recording, cluster, link, bandwidths, latency, algorithm)


def contended(rounds, roles=(0, 1, 2, 3)):
    """Two messages race for the receive port of the third role; who wins depends on how long an earlier message takes."""
    logs = [RankLog(r, 4) for r in range(4)]
    i, j, k, n = roles
    for turn in range(rounds):
        logs[n].send(i, 1000)
        logs[i].recv(n, 1000)
        logs[i].send(k, 700)
        logs[j].compute(flops=(1 + turn % 3) * 1e9)
        logs[j].send(k, 1100)
        handles = [logs[k].recv(i, 700, blocking=False), logs[k].recv(j, 1100, blocking=False)]
        logs[k].compute(flops=0.1e9)
        for handle in handles:
            logs[k].wait(handle)
        for log in logs:
            log.collective("barrier", 0)
    return Recording.from_logs(logs)


def test_lanes_with_another_order_are_simulated_again(monkeypatch):
    recording, cluster = contended(4), Cluster(DEVICE, 1, 4, Link(1000, 0.01))
    calls = []
    monkeypatch.setattr(sweeping, "simulate", lambda *a, run=sweeping.simulate: calls.append(1) or run(*a))
    bandwidths = np.geomspace(100, 10_000, 200)
    found = sweep(recording, cluster, bandwidths=bandwidths)
    assert found.tolist() == one_by_one(recording, cluster, "intra_node", bandwidths)
    assert 2 <= len(calls) <= 8  # at least two orders, and far from one simulation a lane


def test_one_order_needs_one_simulation(monkeypatch):
    logs = [RankLog(r, 8) for r in range(8)]
    for r, log in enumerate(logs):
        for k in range(20):
            log.compute(flops=1e9 * (1 + (r + k) % 3))
            handle = log.send((r + 1) % 8, 1000, blocking=False)
            log.recv((r - 1) % 8, 1000)
            log.wait(handle)
    calls = []
    monkeypatch.setattr(sweeping, "simulate", lambda *a, run=sweeping.simulate: calls.append(1) or run(*a))
    recording = Recording.from_logs(logs)
    found = sweep(recording, Cluster(DEVICE), bandwidths=np.geomspace(10, 1e6, 500))
    assert len(calls) == 1 and len(found) == 500 and (np.diff(found) <= 0).all()
    assert sweep(recording, Cluster(H100, 2, 4), "both", [1e9, 2e9]).shape == (2,)
    assert len(calls) == 1  # the order is known by now


def test_two_messages_of_one_pair_whose_receives_are_posted_the_other_way_round():
    a, b, c = RankLog(0, 3), RankLog(1, 3), RankLog(2, 3)
    c.send(0, 1000)
    b.recv(0, 4000, blocking=False, tag=2)
    b.compute(flops=1e9)
    b.recv(0, 5000, blocking=False, tag=1)  # ready at 1 s
    a.send(1, 5000, blocking=False, tag=1)
    a.recv(2, 1000)
    a.send(1, 4000, blocking=False, tag=2)  # ready when the message from rank 2 is there: earlier or later
    a.compute(flops=1e9)
    a.send(1, 100, blocking=False)
    b.recv(0, 100)
    recording, cluster, bandwidths = Recording.from_logs([a, b, c]), Cluster(DEVICE), np.geomspace(10, 1e5, 50)
    assert sweep(recording, cluster, bandwidths=bandwidths).tolist() == one_by_one(recording, cluster, "intra_node", bandwidths)


@pytest.mark.parametrize("seed", range(20))
def test_where_messages_take_no_time_at_all(seed):
    rng = random.Random(seed)
    recording = random_program(rng, rng.randrange(2, 6), 80, ties=True)
    for events in recording.events:
        events["nbytes"][events["nbytes"] == 1000] = 0
    cluster, bandwidths = Cluster(DEVICE, 6, rng.choice([2, 8]), Link(1000, 0), Link(500, 0)), np.geomspace(50, 50_000, 12)
    replay(recording, dataclasses.replace(cluster, intra_node=Link(2000, 0)))
    assert sweep(recording, cluster, "both", bandwidths).tolist() == one_by_one(recording, cluster, "both", bandwidths)


def test_by_hand():
    a, b = RankLog(0, 2), RankLog(1, 2)
    a.compute(flops=1e9)
    a.send(1, 1000)
    b.recv(0, 1000)
    recording, cluster = Recording.from_logs([a, b]), Cluster(DEVICE, 2, 1, NVLINK4, Link(1.0, 0.5))
    assert sweep(recording, cluster, "inter_node", [1000, 500, 2000]).tolist() == [2.5, 3.5, 2.0]
    assert sweep(recording, cluster, "inter_node", [1000, 500], latency=2).tolist() == [4.0, 5.0]
    assert sweep(recording, cluster, "both", np.array([1000])).tolist() == [2.5]
    alone = sweep(recording, cluster, "inter_node", 1000)
    assert alone.shape == () and alone == 2.5
    unused = sweep(recording, cluster, "intra_node", [1, 2])
    assert unused.tolist() == [1 + 0.5 + 1000] * 2
    assert sweep(Recording.from_logs([RankLog(0, 1)]), cluster, bandwidths=[1, 2]).tolist() == [0, 0]


def test_compute_before_every_operation():
    programs = [RankLog(r, 3) for r in range(3)]
    for r, log in enumerate(programs):
        handles = []
        for k in range(4):
            log.compute(flops=1e9 * (1 + r + k))
            handles.append(log.collective("all_reduce", 300 * (k + 1), blocking=False))
            log.compute(flops=2e9 * (1 + k))
            handles.append(log.send((r + 1) % 3, 500, blocking=False))
            log.compute(flops=0.7e9)
            handles.append(log.recv((r - 1) % 3, 500, blocking=False))
        for handle in handles:
            log.compute(flops=0.3e9)
            log.wait(handle)
        log.compute(flops=1e9)
    recording, cluster, bandwidths = Recording.from_logs(programs), Cluster(DEVICE), np.geomspace(10, 1e5, 40)
    assert sweep(recording, cluster, bandwidths=bandwidths).tolist() == one_by_one(recording, cluster, "intra_node", bandwidths)


@pytest.mark.parametrize("rounds", [1, 40])
def test_long_queues_at_a_port(rounds):
    """Many messages wait at one receiver, more than a check looks back; arrays are used again all the time."""
    programs = [RankLog(r, 5) for r in range(5)]
    for k in range(rounds):
        handles = [programs[0].recv(r, 100 * r + k, blocking=False, tag=t) for t in range(5) for r in range(1, 5)]
        programs[0].compute(flops=0.2e9)
        for r in range(1, 5):
            for t in range(5):
                programs[r].compute(flops=(1 + (r * t) % 3) * 1e8)
                handle = programs[r].send(0, 100 * r + k, blocking=t % 2 == 0, tag=t)
            programs[r].wait(handle)
        for handle in handles:
            programs[0].wait(handle)
    recording, cluster, bandwidths = (
        Recording.from_logs(programs),
        Cluster(DEVICE, 5, 2, Link(1, 0.01), Link(1, 0.02)),
        np.geomspace(300, 1e5, 20),
    )
    assert sweep(recording, cluster, "both", bandwidths).tolist() == one_by_one(recording, cluster, "both", bandwidths)


def test_what_is_kept_between_sweeps_follows_the_device_and_the_nodes():
    programs = [RankLog(r, 4) for r in range(4)]
    for r, log in enumerate(programs):
        log.collective("all_reduce", 400)
        log.compute(flops=1e9 * (r + 1))
    recording = Recording.from_logs(programs)
    for flops, per_node in ((1e9, 4), (2e9, 4), (2e9, 2), (1e9, 2), (1e9, 1)):
        cluster = Cluster(dataclasses.replace(DEVICE, flops=flops), 4, per_node, Link(1000, 0.5), Link(10, 1))
        expected = one_by_one(recording, cluster, "both", [100, 200])
        assert sweep(recording, cluster, "both", [100, 200]).tolist() == expected
    recording = contended(3, (0, 2, 1, 3))  # on nodes of 2, the two messages use different ports
    for per_node in (2, 4, 2):
        cluster = Cluster(DEVICE, 4, per_node, Link(1000, 0.01), Link(1000, 0.01))
        assert sweep(recording, cluster, "both", [500, 900]).tolist() == one_by_one(recording, cluster, "both", [500, 900])


def test_more_lanes_than_go_into_one_pass():
    recording, cluster = contended(2), Cluster(DEVICE, 1, 4, Link(1000, 0.01))
    bandwidths = np.geomspace(100, 10_000, 2 * sweeping.MOST_LANES + 7)
    found = sweep(recording, cluster, bandwidths=bandwidths)
    some = slice(None, None, 97)
    assert found[some].tolist() == one_by_one(recording, cluster, "intra_node", bandwidths[some])


def test_many_sizes(monkeypatch):
    recording = random_program(random.Random(5), 4, 100)
    cluster = Cluster(DEVICE, 1, 4, Link(1000, 0.01))
    expected = sweep(recording, cluster, bandwidths=[10, 100, 1000])
    monkeypatch.setattr(sweeping, "MOST_SIZES", 3)
    assert sweep(recording, cluster, bandwidths=[10, 100, 1000]).tolist() == expected.tolist()


def test_a_deadlock_is_explained():
    a, b = RankLog(0, 2), RankLog(1, 2)
    a.recv(1, 8)
    b.recv(0, 8)
    with pytest.raises(Deadlock, match="rank 0 waits in recv from rank 1"):
        sweep(Recording.from_logs([a, b]), Cluster(H100), bandwidths=[1e9])


@pytest.mark.parametrize(
    "bandwidths, words",
    [
        (None, "needs bandwidths"), ([], "shape"), ([1e9, 0], "number 1 is 0.0"),
        ([1e9, -5.0], "number 1 is -5"), (0, "number 0 is 0"),
        ([np.nan], "number 0 is nan"), ([np.inf], "number 0 is inf"), ([[1e9]], "shape"), (True, "must be numbers"),
        ("fast", "must be numbers"), ([True], "must be numbers"), ([None], "must be numbers"), ([1j], "must be numbers"),
        ([[1, 2], [3]], "must be numbers"),
    ],
)  # fmt: skip
def test_bad_bandwidths(bandwidths, words):
    recording = Recording.from_logs([RankLog(0, 1)])
    with pytest.raises((ValueError, TypeError), match=f"{words}.*[Gg]ive one positive, finite number"):
        sweep(recording, Cluster(H100), bandwidths=bandwidths)


def test_other_bad_arguments():
    recording = Recording.from_logs([RankLog(r, 4) for r in range(4)])
    for call, error, words in (
        (lambda: sweep(recording, Cluster(H100), "nvlink", [1e9]), ValueError, "'nvlink'.*'intra_node', 'inter_node' or 'both'"),
        (lambda: sweep(recording, Cluster(H100), bandwidths=[1e9], latency=-1), ValueError, "latency is -1.*0 or more"),
        (lambda: sweep(recording, Cluster(H100), bandwidths=[1e9], latency="1"), TypeError, "latency must be"),
        (lambda: sweep(recording, Cluster(H100), bandwidths=[1e9], algorithm="x"), ValueError, "'x'"),
        (lambda: sweep(recording, Cluster(H100, 1, 2), bandwidths=[1e9]), ValueError, "only 2 devices"),
        (lambda: sweep(recording, None, bandwidths=[1e9]), TypeError, "hardware.Cluster"),
        (lambda: sweep(None, Cluster(H100), bandwidths=[1e9]), TypeError, "Recording"),
    ):
        with pytest.raises(error, match=words):
            call()
