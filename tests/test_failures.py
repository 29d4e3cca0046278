"""Which of several errors is shown, in which words, and where a line of a program is."""

import faulthandler
import os
import sysconfig
import tempfile

import pytest
import torch

from lessons_lib import sources
from lessons_lib.errors import BufferMisuse, Deadlock, Mismatch, RankFailed
from lessons_lib.ranks import failures, tracebacks
from lessons_lib.ranks.failures import Failure

GLOO = Failure(0, "raised", "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer", secondary=True)


def raised(rank, summary="ValueError: bad", clock=0, **more) -> Failure:
    return Failure(rank, "raised", summary, clock=clock, **more)


def test_the_earliest_in_logical_time_comes_first_and_consequences_are_notes():
    error = failures.explain([raised(3, "KeyError: 1", clock=9), raised(1, clock=4, place="cell 2, line 3"), GLOO], None, 6)
    assert str(error) == "rank 1 raised ValueError: bad\nrank 3 failed too: KeyError: 1\nThe other ranks were stopped."
    assert (error.rank, error.ranks, error.others) == (1, [1, 3], {0: GLOO.summary})


def test_the_same_mistake_is_told_once_although_each_rank_names_itself():
    found = [raised(r, f"BufferMisuse: rank {r} lost it", known="BufferMisuse", message=f"Rank {r} lost it") for r in (2, 0, 1)]
    error = failures.explain(found, None, 3)
    assert type(error) is BufferMisuse
    assert str(error) == "Rank 0 lost it\nranks 1 and 2 failed in the same way."


@pytest.mark.parametrize(
    ("found", "proof", "wanted"),
    [
        ([GLOO], Mismatch("sizes"), Mismatch),
        ([failures.died(1, -6, "", "", "terminate called ... gloo::EnforceNotMet")], Mismatch("sizes"), Mismatch),
        ([failures.died(1, -9, "", "")], Deadlock("circle"), RankFailed),
        ([raised(2)], Deadlock("a consequence"), RankFailed),
        ([GLOO], None, RankFailed),
        ([], Deadlock("circle"), Deadlock),
    ],
)
def test_proofs_beat_gloo_and_causes_beat_proofs(found, proof, wanted):
    assert type(failures.explain(found, proof, 4)) is wanted


def test_how_a_process_died():
    assert failures.died(2, -9, "", "").summary == "was killed by signal 9 (SIGKILL)"
    died = failures.died(2, 3, "waiting in recv", "")
    assert died.message == "rank 2 exited with code 3 before its program returned; it was waiting in recv"
    assert "segfault" not in failures.died(2, -11, "", "cell 1, line 2: f()").message
    assert failures.died(2, -11, "x", "cell 1, line 2: f()").message.endswith("(SIGSEGV); it was at cell 1, line 2: f()")


@pytest.mark.parametrize(
    ("error", "secondary"),
    [
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection reset by peer"), True),
        (torch.distributed.DistNetworkError("Connection was closed"), True),
        (torch.distributed.DistBackendError("Timed out waiting 1000ms"), True),
        (RuntimeError("my own simulation timed out"), False),
        (ValueError("connection closed"), False),
        (ConnectionResetError("reset by a web server"), False),
    ],
)
def test_what_only_tells_of_another_rank(error, secondary):
    assert tracebacks.is_secondary(error) is secondary


def test_a_stack_written_by_faulthandler_is_understood():
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        stack = tracebacks.of_faulthandler(file.read())
    assert os.path.basename(stack[-1].filename) == "test_failures.py"
    assert tracebacks.place(stack).endswith("faulthandler.dump_traceback(file, all_threads=True)")
    assert tracebacks.of_faulthandler("") == [] and tracebacks.place([]) == "" and tracebacks.stack_text([]) == ""


def test_a_deep_recursion_is_shortened():
    def down(n):
        return down(n - 1) + 1

    with pytest.raises(RecursionError) as caught:
        down(10_000)
    text = tracebacks.exception_text(caught.value)
    assert len(text.splitlines()) < 40 and "more frames" in text


class Silent(RuntimeError):
    def __str__(self):
        raise ValueError("no")


def test_notes_are_told_addresses_are_not_and_a_message_may_fail():
    error = ValueError(f"in {object()!r}")
    error.__notes__ = ["while loading shard 3"]
    assert tracebacks.summary(error) == "ValueError: in <object object>\nwhile loading shard 3"
    assert tracebacks.summary(Silent()) == "Silent: (its message cannot be shown)"
    assert tracebacks.is_secondary(Silent()) is False


def test_what_an_exception_contains_and_came_of_is_told_once():
    origin = KeyError("shard")
    origin.__cause__ = origin  # a circle must end
    group = ValueError("several")
    group.exceptions = [ZeroDivisionError("a"), ZeroDivisionError("b"), "not an exception"]
    group.__cause__ = origin
    lines = tracebacks.exception_text(group).splitlines()
    assert lines == ["It contains ZeroDivisionError: a", "It contains ZeroDivisionError: b", "It came of KeyError: 'shard'"]


# ---- whose code it is, and what it is called --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("filename", "mine"),
    [
        (__file__, True),
        ("train.py", True),
        ("<stdin>", True),
        ("<ipython-input-3-abc>", True),
        (sources.__file__, False),
        (os.path.join(os.path.dirname(sources.__file__), "parallel", "ring.py"), True),
        (os.__file__, False),
        (torch.__file__, False),
        (os.path.join(sysconfig.get_path("purelib"), "anything.py"), False),
        ("<frozen importlib._bootstrap>", False),
        ("<__array_function__ internals>", False),
    ],
)
def test_whose_code_it_is(filename, mine):
    assert sources.is_user_code(filename) is mine


def test_lines_of_files_and_of_cells(tmp_path):
    file = tmp_path / "train.py"
    file.write_text("import torch\n    x.view(3)  \n")
    assert sources.describe(str(file), 2) == "train.py, line 2: x.view(3)"
    assert sources.describe(str(file), 7) == "train.py, line 7"
    assert sources.describe("<stdin>", None) == "<stdin>"
    before = sources._installed
    try:
        sources.install(sources.Sources({"/tmp/ipykernel_1/2.py": "cell 3"}, {"/tmp/ipykernel_1/2.py": ["a = 1\n", "b(a)\n"]}))
        assert sources.describe("/tmp/ipykernel_1/2.py", 2) == "cell 3, line 2: b(a)"
        assert sources.collect().lines["/tmp/ipykernel_1/2.py"] == ["a = 1\n", "b(a)\n"]
    finally:
        sources.install(before)
