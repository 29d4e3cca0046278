"""run() on real processes: what travels, what is shown, how failures are told."""

import ctypes
import functools
import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

import lessons_lib
from lessons_lib.errors import Deadlock, Mismatch, RankFailed, RunError
from lessons_lib.hardware import Link
from lessons_lib.ranks import launch, run
from lessons_lib.ranks.printing import LINES_KEPT

FACTOR = 3
LOCK = threading.Lock()


class Point:
    def __init__(self, x):
        self.x = x

    def __call__(self, y):
        return self.x * y + dist.get_rank()

    def method(self):
        return Point(self.x + dist.get_rank())


def rank():
    return dist.get_rank()


# ---- what travels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_results_come_in_rank_order(ranks):
    recording = run(lambda a, b=0: (dist.get_rank(), dist.get_world_size(), a + b), 5, b=2, ranks=ranks)
    assert recording.results == [(r, ranks, 7) for r in range(ranks)]
    assert recording.world_size == ranks


def test_sixty_four_ranks():
    def program():
        x = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(x)
        return x.item()

    assert run(program, ranks=64).results == [64 * 63 / 2] * 64


def test_closures_globals_partials_methods_and_callable_objects():
    shift = [10, 20]

    def outer():
        def inner(k):
            return shift[rank()] + k * FACTOR

        return inner(1)

    assert run(outer, ranks=2).results == [13, 23]
    assert run(functools.partial(lambda a, b: a - b, b=1), 5, ranks=2).results == [4, 4]
    assert run(Point(4), 5, ranks=2).results == [20, 21]
    results = run(Point(4).method, ranks=2).results
    assert [type(p) for p in results] == [Point, Point], "a class comes back as the one that was sent"
    assert [p.x for p in results] == [4, 5]


def test_modules_of_a_class_of_their_own_travel_by_name():
    """This package and torch.ops are such modules; cloudpickle knows plain ones alone."""

    def program():
        return lessons_lib.hardware.H100.name, torch.ops.aten.add(torch.ones(1), 1).item()

    assert run(program, ranks=2).results == [("H100", 2.0)] * 2


def test_tensors_return_by_value_and_only_what_they_show():
    def program():
        generator = torch.Generator().manual_seed(rank())
        big = torch.randn(1_000_000, generator=generator)
        weight = torch.nn.Parameter(big[:4])
        return {"view": big[2:5], "half": big[:4].half(), "grad": weight, "out": (weight * 2)[:1], "int": torch.arange(3)}

    for r, result in enumerate(run(program, ranks=2).results):
        wanted = torch.randn(1_000_000, generator=torch.Generator().manual_seed(r))
        assert torch.equal(result["view"], wanted[2:5])
        assert result["view"].untyped_storage().nbytes() == 12
        assert torch.equal(result["half"], wanted[:4].half())
        assert isinstance(result["grad"], torch.nn.Parameter) and torch.equal(result["grad"], wanted[:4])
        assert torch.equal(result["out"], wanted[:1] * 2)
        assert result["int"].tolist() == [0, 1, 2]


def test_a_big_argument_and_a_big_result():
    size = 30_000_000  # 120 MB
    sums = run(lambda x: x + rank(), torch.ones(size), ranks=2).results
    assert [float(x[-1]) for x in sums] == [1.0, 2.0] and sums[0].numel() == size


def test_every_rank_starts_from_seed_zero_with_torchruns_environment():
    def program():
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LESSONS_TEST")
        threads = torch.get_num_threads()
        return torch.rand(1).item(), random.random(), float(np.random.rand()), [os.environ.get(n) for n in names], threads

    os.environ["LESSONS_TEST"] = "seen"
    try:
        results = run(program, ranks=3).results
    finally:
        del os.environ["LESSONS_TEST"]
    numbers = torch.rand(1, generator=torch.Generator().manual_seed(0)).item(), random.Random(0).random()
    for r, result in enumerate(results):
        assert result[:2] == numbers and result[2] == float(np.random.RandomState(0).rand())
        assert result[3:] == ([str(r), str(r), "3", "3", "seen"], 1)


@pytest.mark.parametrize("way", ["file", "stdin", "command", "spawn"])
def test_scripts_need_no_guard(way, tmp_path):
    text = (
        "import torch.distributed as dist\nfrom lessons_lib import run\n"
        "def program(k):\n    print('k is', k)\n    assert dist.get_rank() != 1 or k < 5, 'too large'\n"
        "    return dist.get_rank() * k\n"
        "print('once')\nprint(run(program, 3, ranks=2).results)\n"
        "class Note:\n    def __init__(self, n): self.n = n\n"
        "def exchange():\n    found = [None] * 2\n    dist.all_gather_object(found, Note(dist.get_rank()))\n"
        "    return [note.n for note in found]\n"
        "print(run(exchange, ranks=2).results)\n"
        "try:\n    run(program, 5, ranks=2)\nexcept RuntimeError as error:\n    print(error)\n"
    )
    script = tmp_path / "script.py"
    script.write_text(text)
    name = {"stdin": "<stdin>", "command": "the command line"}.get(way, "script.py")
    shown = "    assert dist.get_rank() != 1 or k < 5, 'too large'\n" if name == "script.py" else ""
    told = _python(
        *{"stdin": ["-"], "command": ["-c", text]}.get(way, ["script.py"]), input=text, cwd=tmp_path, spawn=way == "spawn"
    )
    assert told == (
        "once\n[rank 0] k is 3\n[rank 1] k is 3\n[0, 3]\n[[0, 1], [0, 1]]\n[rank 0] k is 5\n[rank 1] k is 5\n"
        f"rank 1 raised AssertionError: too large\n  {name}, line 5, in program\n{shown}The other rank was stopped.\n"
    )


def test_a_module_of_the_learner_as_it_was_imported_also_after_an_edit(tmp_path):
    (tmp_path / "helper.py").write_text("SCALE = 2\ndef scaled(x):\n    return SCALE * x\n")
    (tmp_path / "script.py").write_text(
        "import pathlib, helper\nfrom lessons_lib import run\n"
        "def program():\n    return helper.scaled(3)\n"
        "print(run(program, ranks=2).results, run(helper.scaled, 4, ranks=1).results)\n"
        "pathlib.Path('helper.py').write_text('raise RuntimeError(\"edited, and broken\")')\n"
        "print(run(program, ranks=2).results)\n"
        "import importlib; pathlib.Path('helper.py').write_text('def scaled(x):\\n    return -x  # reloaded\\n')\n"
        "importlib.reload(helper); print(run(program, ranks=2).results)\n"
    )
    assert _python("script.py", cwd=tmp_path) == "[6, 6] [8]\n[6, 6]\n[-3, -3]\n"


def _python(*args, input=None, cwd=None, spawn=False) -> str:
    home = str(Path(launch.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": home, "LESSONS_HOLD_SECONDS": "30", **({"LESSONS_START": "spawn"} if spawn else {})}
    done = subprocess.run([sys.executable, *args], input=input, text=True, capture_output=True, timeout=120, cwd=cwd, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


# ---- what cannot travel ----------------------------------------------------------------------------------------------------


def _with_lock(lock):
    def inner():
        return lock

    return lambda: inner()


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: (_with_lock(LOCK),), "the variable `lock` used by inner() (test_ranks.py, line"),
        (lambda: ((lambda lock=LOCK: 1),), "the default value of `lock` in <lambda>() is a lock"),
        (lambda: (print, {"a": [1, (n for n in range(3))]}), "item 1 of entry 'a' of argument 1 of the program is a generator"),
        (lambda: (functools.partial(print, LOCK),), "item 0 of the arguments in the program partial is a lock"),
        (lambda: (Point(LOCK),), "`.x` of the program Point is a lock"),
    ],
)
def test_what_cannot_be_sent_is_named(make, named):
    with pytest.raises(TypeError) as caught:
        run(*make(), ranks=2)
    assert named in str(caught.value) and "create it inside the program" in str(caught.value)


def test_a_closure_over_an_open_file_is_named(tmp_path):
    with open(tmp_path / "data.txt", "w") as handle:

        def program():
            return handle.name

        with pytest.raises(
            TypeError, match=r"the variable `handle` used by program\(\) \(test_ranks.py, line \d+\) is an open file"
        ):
            run(program, ranks=2)


def test_a_result_that_cannot_be_sent_names_rank_and_type():
    with pytest.raises(RankFailed, match="rank 1: what the program returned cannot be sent back: item 1 of the result is a lock"):
        run(lambda: [0, threading.Lock()] if rank() == 1 else 0, ranks=3)


def test_a_result_that_only_lives_among_ranks_says_what_to_return_instead():
    def program():
        return torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))

    with pytest.raises(RankFailed, match=r"the result of rank 0 cannot be read here.*its \.module"):
        run(program, ranks=2, timeout=30.0)


def test_results_without_data_come_back_as_meta_tensors():
    [result] = run(lambda: {"y": torch.ones(3, 4) @ torch.ones(4, 5)}, ranks=1, shapes_only=True).results
    assert result["y"].device.type == "meta" and result["y"].shape == (3, 5)


# ---- arguments -------------------------------------------------------------------------------------------------------------


async def _coroutine():
    return 1


def _generator():
    yield 1


@pytest.mark.parametrize(
    ("how", "kind", "says"),
    [
        ({"ranks": 0}, ValueError, "ranks=0: from 1 to 64"),
        ({"ranks": 65}, ValueError, "ranks=65: from 1 to 64"),
        ({"ranks": -1}, ValueError, "ranks=-1"),
        ({"ranks": True}, TypeError, "ranks=True: give a whole number"),
        ({"ranks": 2.0}, TypeError, "ranks=2.0"),
        ({"ranks": None}, TypeError, "ranks=None"),
        ({"timeout": 0}, ValueError, "timeout=0"),
        ({"timeout": float("nan")}, ValueError, "timeout=nan"),
        ({"timeout": float("inf")}, ValueError, "timeout=inf"),
        ({"timeout": True}, TypeError, "timeout=True"),
        ({"timeout": "10"}, TypeError, "timeout='10'"),
        ({"shapes_only": 1}, TypeError, "shapes_only=1"),
        ({"throttle": 1e9}, TypeError, "throttle=1000000000.0: give a Link"),
        ({"throttle": Link(1e9, 0.0), "shapes_only": True}, ValueError, "throttle with shapes_only"),
        ({"program": 3}, TypeError, "without calling it"),
        ({"program": _coroutine}, TypeError, "_coroutine is an async function"),
        ({"program": _generator}, TypeError, "_generator is a generator function"),
        ({"program": functools.partial(_generator)}, TypeError, "_generator is a generator function"),
    ],
)
def test_arguments_that_cannot_work(how, kind, says):
    program = how.pop("program", rank)
    with pytest.raises(kind) as caught:
        run(program, **how)
    assert says in str(caught.value)


@pytest.mark.skipif(sys.platform == "win32", reason="there a folder in use cannot be removed")
def test_a_folder_that_was_removed_is_told(tmp_path, monkeypatch):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(ValueError, match=r"was removed.*os\.chdir"):
        run(lambda: 1, ranks=2)


def test_run_inside_run():
    with pytest.raises(RunError, match=r"run\(\) was called inside rank 0 of another run"):
        run(lambda: run(rank), ranks=2)


# ---- what is shown ---------------------------------------------------------------------------------------------------------


def test_lines_from_everywhere_arrive_whole_and_once(capsys):
    def program():
        print("first", end=" ")
        print("line \u00e9\u4e2d")
        os.write(1, b"written by C\n")
        print("to stderr", file=sys.stderr)
        os.system("echo from a shell")
        sys.stdout.buffer.write(b"bytes\n")
        print("10%\r100%")
        print("no newline", end="")

    recording = run(program, ranks=2)
    lines = ["first line \u00e9\u4e2d", "written by C", "to stderr", "from a shell", "bytes", "100%", "no newline"]
    assert recording.output == [(r, line) for line in lines for r in range(2)]
    assert capsys.readouterr().out == "".join(f"[rank {r}] {line}\n" for line in lines for r in range(2))


def test_much_output_is_bounded_and_counted(capsys):
    extra = 1234

    def program():
        for number in range(LINES_KEPT + extra):
            print(number)

    recording = run(program, ranks=2)
    mine = [line for r, line in recording.output if r == 1]
    assert mine[:-1] == [str(n) for n in range(LINES_KEPT)]
    assert mine[-1].startswith(f"... {extra:,} more lines left out")
    assert capsys.readouterr().out.count("\n") == 2 * (LINES_KEPT + 1)


def test_without_data_ranks_take_turns_and_lines_come_by_rank(capsys):
    def program():
        before = time.perf_counter()
        print("a")
        dist.all_reduce(torch.ones(3))
        print("b")
        time.sleep(0.02)
        return before, time.perf_counter()

    recording = run(program, ranks=9, shapes_only=True)
    assert recording.output == [(r, line) for r in range(9) for line in "ab"]
    assert capsys.readouterr().out == "".join(f"[rank {r}] {line}\n" for r, line in recording.output)
    overlapping = [sum(a <= start < b for a, b in recording.results) for start, _ in recording.results]
    assert max(overlapping) <= os.cpu_count()


@pytest.mark.parametrize("seed", range(3))
def test_output_is_the_same_at_any_speed(seed, monkeypatch, capsys):
    """A pipeline with random pauses: what a rank prints after a receive comes after what the sender printed before."""
    monkeypatch.setenv("LESSONS_HOLD_SECONDS", "30")

    def program(pauses):
        x = torch.zeros(1)
        for microbatch in range(3):
            time.sleep(pauses[rank()][microbatch])
            if rank() > 0:
                dist.recv(x, rank() - 1)
            print(f"microbatch {microbatch}")
            if rank() < 2:
                dist.send(x, rank() + 1)

    shown = []
    for _ in range(2):
        rng = random.Random(time.perf_counter_ns() if shown else seed)
        recording = run(program, [[rng.choice([0, 0, 0.03]) for _ in range(3)] for _ in range(3)], ranks=3)
        shown.append((capsys.readouterr().out, recording.output))
    assert shown[0] == shown[1]
    for first, second in ((0, 1), (1, 2)):
        for microbatch in range(3):
            at = [shown[0][1].index((r, f"microbatch {microbatch}")) for r in (first, second)]
            assert at[0] < at[1]


def test_a_line_is_shown_although_another_rank_is_slow(monkeypatch):
    monkeypatch.setenv("LESSONS_HOLD_SECONDS", "0.2")
    seen = []

    class Screen:
        def write(self, text):
            seen.append((text, time.monotonic()))

        def flush(self):
            pass

    def program():
        if rank() == 1:
            print("early")
        time.sleep(2)
        print("late")

    monkeypatch.setattr(sys, "stdout", Screen())
    run(program, ranks=2)
    assert [text for text, _ in seen][0] == "[rank 1] early\n"
    assert seen[-1][1] - seen[0][1] > 1.0, "it was shown while the program still ran"


# ---- failures --------------------------------------------------------------------------------------------------------------


def failure(program, *args, ranks=4, **how) -> RunError:
    with pytest.raises(RunError) as caught:
        run(program, *args, ranks=ranks, **how)
    assert not _leftovers(), "no rank is left"
    return caught.value


def _leftovers() -> list[psutil.Process]:
    """Ranks that still exist: children of the template."""
    template = psutil.Process(launch._template.popen.pid)
    gone, alive = psutil.wait_procs(template.children(recursive=True), timeout=5)
    return alive


def test_one_rank_raises():
    def program():
        if rank() == 2:
            raise ValueError("bad shape")
        dist.barrier()

    error = failure(program)
    assert type(error) is RankFailed and (error.rank, error.ranks) == (2, [2])
    line = program.__code__.co_firstlineno + 2
    assert str(error).splitlines() == [
        "rank 2 raised ValueError: bad shape",
        f"  test_ranks.py, line {line}, in program",
        '    raise ValueError("bad shape")',
        "The other ranks were stopped.",
    ]
    assert error.__cause__ is None and error.__suppress_context__
    assert "ValueError: bad shape" in error.traceback_text


def test_all_ranks_raise_the_same():
    def program():
        torch.ones(3).view(5)

    error = failure(program)
    assert error.ranks == [0, 1, 2, 3]
    assert str(error).startswith("rank 0 raised RuntimeError: shape '[5]' is invalid for input of size 3\n  test_ranks.py, line ")
    assert str(error).endswith("ranks 1, 2 and 3 failed in the same way.")


def test_the_cause_of_an_exception_is_told():
    def program():
        try:
            return {}["key"]
        except KeyError as error:
            raise RuntimeError("second") from error

    lines = str(failure(program, ranks=1)).splitlines()
    assert lines[0] == "rank 0 raised RuntimeError: second" and "It came of KeyError: 'key'" in lines


@pytest.mark.parametrize("end", ["kill", "exit", "crash"])
def test_one_rank_dies(end):
    def program():
        x = torch.ones(8)
        dist.all_reduce(x)
        if rank() == 2:
            if end == "kill":
                os.kill(os.getpid(), 9)
            if end == "exit":
                os._exit(3)
            ctypes.string_at(0)
        dist.all_reduce(x)

    error = failure(program)
    says = {"kill": "rank 2 was killed by signal 9 (SIGKILL)", "exit": "rank 2 exited with code 3"}
    assert str(error).startswith(says.get(end, "rank 2 was killed by signal 11 (SIGSEGV); it was at test_ranks.py, line"))
    assert error.rank == 2
    if end != "crash":
        assert "last seen in all_reduce of 8 float32 (test_ranks.py, line" in str(error)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_errors_that_end_a_program(error):
    def program():
        raise error

    text = str(failure(program, ranks=2))
    assert text.startswith("rank 0 called sys.exit(3)" if isinstance(error, SystemExit) else "rank 0 raised KeyboardInterrupt")


def test_sys_exit_without_a_code_is_an_end_like_any_other():
    assert run(lambda: sys.exit(), ranks=2).results == [None, None]


def test_what_plain_torch_hangs_on_is_proved():
    def both_send():
        x = torch.ones(3)
        dist.send(x, 1 - rank())
        dist.recv(x, 1 - rank())

    def sizes():
        dist.all_reduce(torch.ones(5 if rank() == 0 else 8))

    assert isinstance(failure(both_send, ranks=2), Deadlock)
    error = failure(sizes, ranks=2)
    assert isinstance(error, Mismatch) and "[5] float32" in str(error) and "[8] float32" in str(error)


def test_a_time_out_says_where_each_rank_is():
    def forever():
        mine = dist.get_rank()
        while mine == 1:
            pass
        if mine == 2:
            threading.Event().wait()

    error = failure(forever, ranks=3, timeout=0.5)
    first = forever.__code__.co_firstlineno
    assert error.ranks == [1, 2]
    assert "the program did not finish within 0.5 s; 1 of 3 ranks had finished." in str(error)
    assert f"rank 1 is at test_ranks.py, line {first + 2}: while mine == 1:" in str(error) or f"line {first + 3}: pass" in str(
        error
    )
    assert f"rank 2 is at test_ranks.py, line {first + 5}: threading.Event().wait()" in str(error)


def test_a_time_out_ends_a_rank_that_is_stuck_in_c_code():
    def stuck():
        ctypes.PyDLL(None).sleep(1000)  # keeps the interpreter's lock

    error = failure(stuck, ranks=1, timeout=0.3)
    assert f"rank 0 is at test_ranks.py, line {stuck.__code__.co_firstlineno + 1}: ctypes.PyDLL" in str(error)


def test_what_ranks_started_ends_with_them():
    def program():
        return subprocess.Popen(["sleep", "1000"]).pid

    for pid in run(program, ranks=2).results:
        _, alive = psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=5)
        assert not alive


def test_runs_from_two_threads_at_once():
    def program(k):
        x = torch.tensor([float(k + rank())])
        dist.all_reduce(x)
        return x.item()

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda k: run(program, k, ranks=3).results, [0, 10, 20, 30]))
    assert found == [[3.0 + 3 * k] * 3 for k in (0, 10, 20, 30)]


def test_a_template_that_was_killed_is_replaced():
    assert run(rank, ranks=2).results == [0, 1]
    before = launch._template.popen.pid
    os.kill(before, 9)
    launch._template.popen.wait()
    assert run(rank, ranks=2).results == [0, 1]
    assert launch._template.popen.pid != before


def test_no_folder_is_left_and_those_of_killed_launchers_are_removed(tmp_path, monkeypatch):
    import tempfile

    from lessons_lib import ranks

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name, age in (("old", 100), ("fresh", 0)):
        folder = tmp_path / f"lessons-run-1-{name}"
        folder.mkdir()
        os.utime(folder, (time.time() - age,) * 2)
    ranks._remove_stale.cache_clear()
    with ranks._folder() as mine:
        os.utime(mine, (time.time() - 100,) * 2)
        ranks._remove_stale.cache_clear()
        ranks._remove_stale()
        assert Path(mine).exists(), "a folder in use is locked"
    run(rank, ranks=2)
    with pytest.raises(RankFailed):
        run(lambda: 1 / 0, ranks=2)
    assert [path.name for path in tmp_path.iterdir()] == ["lessons-run-1-fresh"]


def test_what_keeps_ranks_from_starting_is_told(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('this torch is broken')\n")
    text = "import sys\nsys.path.insert(0, '.')\nfrom lessons_lib.ranks import run\n"
    text += "try:\n    run(print, ranks=2)\nexcept RuntimeError as error:\n    print(error)\n"
    told = _python("-c", text, cwd=tmp_path)
    assert told.startswith("the process that starts the ranks ended: status 1") and "this torch is broken" in told
