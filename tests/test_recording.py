"""The recording itself: joined from logs, counted, saved and loaded, shown."""

import json
import random
import subprocess
import sys

import numpy as np
import pytest

from lessons_lib.recording import COMPUTE, EVENT, RankLog, Recording, Table


def random_recording(seed, ranks=3, events=50):
    """Ranks that send around, compute and all-reduce at random; counts kept beside it."""
    rng = random.Random(seed)
    logs = [RankLog(r, ranks) for r in range(ranks)]
    sent, messages = np.zeros((ranks, ranks), dtype=int), np.zeros((ranks, ranks), dtype=int)
    flops, calls = [0] * ranks, {}
    for _ in range(events):
        a, b = rng.sample(range(ranks), 2)
        size = rng.randrange(1, 10**6)
        what = rng.choice(["message", "compute", "collective"])
        if what == "message":
            handle = logs[a].send(b, size, blocking=rng.random() < 0.5, label=rng.choice(["", "x"]), line=f"line {size}")
            logs[b].recv(a, size)
            logs[a].wait(handle)
            sent[a, b] += size
            messages[a, b] += 1
        elif what == "compute":
            count = rng.randrange(1, 4)
            logs[a].compute(flops=size, nbytes=7, name=rng.choice("pq"), count=count, label="work")
            flops[a] += size * count
        else:
            group = tuple(sorted((a, b)))
            for r in group:
                logs[r].collective("all_reduce", size, group=group)
            calls["all_reduce", 2, size] = calls.get(("all_reduce", 2, size), 0) + 1
    return Recording.from_logs(logs, results=[1, "two", None], output=[(0, "hello")]), sent, messages, flops, calls


@pytest.mark.parametrize("seed", range(4))
def test_counts(seed):
    recording, sent, messages, flops, calls = random_recording(seed)
    assert (recording.sent_bytes == sent).all() and (recording.sent_messages == messages).all()
    assert recording.flops == flops
    assert {row[:3]: row[3] for row in recording.collectives} == calls


@pytest.mark.parametrize("seed", range(3))
def test_save_and_load(tmp_path, seed):
    recording = random_recording(seed)[0]
    recording.save(tmp_path / "r.json")
    again = Recording.load(tmp_path / "r.json")
    assert all((a == b).all() for a, b in zip(recording.events, again.events, strict=True))
    assert all((a == b).all() for a, b in zip(recording.costs, again.costs, strict=True))
    for name in ("world_size", "ops", "groups", "labels", "lines", "operators", "results", "output", "warnings", "shapes_only"):
        assert getattr(recording, name) == getattr(again, name), name


def test_results_that_json_cannot_hold_are_saved_as_text(tmp_path):
    recording = random_recording(0)[0]
    recording.results = [complex(1, 2), {"a": range(3)}, np.float64(1.5)]
    recording.save(tmp_path / "r.json")
    assert Recording.load(tmp_path / "r.json").results == ["(1+2j)", {"a": "range(0, 3)"}, 1.5]


@pytest.mark.parametrize(
    "text,words",
    [
        ("", "does not hold JSON"),
        ("[1]", "not a saved recording"),
        ('{"format": "recording", "version": 99}', "version 99"),
        ('{"format": "recording", "version": 1}', "damaged"),
    ],
)
def test_files_that_are_not_recordings(tmp_path, text, words):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ValueError, match=words) as caught:
        Recording.load(tmp_path / "r.json")
    assert "r.json" in str(caught.value)


def test_a_damaged_column(tmp_path):
    recording = random_recording(1)[0]
    recording.save(tmp_path / "r.json")
    data = json.loads((tmp_path / "r.json").read_text())
    data["events"][0]["peer"] = data["events"][0]["peer"][:-1]
    (tmp_path / "r.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match="damaged"):
        Recording.load(tmp_path / "r.json")


DAMAGE = {
    "more ranks": lambda d: d.update(world_size=5),
    "ranks as text": lambda d: d.update(world_size="3"),
    "ranks as a bool": lambda d: d.update(world_size=True),
    "no ranks": lambda d: d.update(world_size=0, events=[], costs=[]),
    "a column of one row": lambda d: d["events"][0].update(peer=[0]),
    "a peer that is not there": lambda d: d["events"][0]["peer"].__setitem__(0, 99),
    "a kind below 0": lambda d: d["events"][0]["kind"].__setitem__(0, -1),
    "a label that is not there": lambda d: d["events"][1]["label"].__setitem__(0, 7000),
    "a line that is not there": lambda d: d["events"][1]["line"].__setitem__(0, -2),
    "a group that is not there": lambda d: d["events"][1]["group"].__setitem__(0, 99),
    "bytes without end": lambda d: d["events"][0]["nbytes"].__setitem__(0, 1e300),
    "a time that is no number": lambda d: d["events"][0]["start"].__setitem__(0, float("nan")),
    "a cost of no operator": lambda d: d["costs"][0]["operator"].__setitem__(0, 99),
    "a group of other ranks": lambda d: d.update(groups=[[0, 99]]),
    "a group of texts": lambda d: d.update(groups=[["a"]]),
    "no labels": lambda d: d.update(labels=None),
    "FLOPs as text": lambda d: d.update(operators=[["mm", "many", 1]] * len(d["operators"])),
    "FLOPs below 0": lambda d: d.update(operators=[["mm", -5, 1]] * len(d["operators"])),
    "events without a list": lambda d: d.update(events=3),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_found_when_the_file_is_read(tmp_path, what):
    path = tmp_path / "r.json"
    random_recording(2)[0].save(path)
    data = json.loads(path.read_text())
    DAMAGE[what](data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"r\.json is a damaged recording"):
        Recording.load(path)


@pytest.mark.parametrize("amount", [-1, float("nan"), float("inf")])
def test_compute_by_hand_needs_sensible_amounts(amount):
    for amounts in ({"flops": amount}, {"nbytes": amount}):
        with pytest.raises(ValueError, match="finite flops and nbytes of 0 or more"):
            RankLog(0, 1).compute(**amounts)


def test_an_empty_program():
    recording = Recording.from_logs([RankLog(0, 1)])
    assert recording.flops == [0] and recording.collectives == [] and recording.sent_bytes.tolist() == [[0]]
    assert "1 rank" in repr(recording)


def test_memory_is_linear_and_small_per_event():
    assert EVENT.itemsize <= 100
    log = RankLog(0, 1)
    for _ in range(1000):
        log.compute(flops=5, name="mm", label="same")
    recording = Recording.from_logs([log])
    assert len(recording.events[0]) == 1000 and len(recording.operators) == 1 and recording.labels == ["same"]
    assert (recording.events[0]["kind"] == COMPUTE).all()


def test_tables_show_themselves():
    table = Table(("name", "bytes"), [("<a>", 1234567), ("b", 5)])
    assert repr(table).splitlines() == ["name      bytes", "---------------", "<a>   1,234,567", "b             5"]
    assert "&lt;a&gt;" in table._repr_html_() and "1,234,567" in table._repr_html_()


def test_a_recording_needs_no_torch(tmp_path):
    """A saved recording is loaded, replayed and drawn where torch cannot be imported."""
    recording = random_recording(2)[0]
    recording.save(tmp_path / "r.json")
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from lessons_lib import Recording, replay, hardware\n"
        f"timeline = replay(Recording.load({str(tmp_path / 'r.json')!r}), hardware.Cluster(hardware.H100))\n"
        "print(timeline.step_time > 0, '<svg' in timeline._repr_svg_())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["True", "True"], done.stderr
