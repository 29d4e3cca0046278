"""A real Jupyter kernel that runs ranks: interrupted, restarted, killed. Nothing may stay, and the next cell must work."""

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from jupyter_client import KernelManager

HOME = str(Path(__file__).parents[1])
PATIENCE = 120  # seconds for a cell that should work; only a failure takes that long
GONE = 10  # seconds for processes to end; the benchmark prints how long it takes

FOREVER = "def forever():\n    print('here')\n    while True:\n        pass\nrun(forever, timeout=None)"
IN_C_CODE = """
import ctypes
def stuck():
    print('here')
    ctypes.PyDLL(None).sleep(1000)
run(stuck, ranks=2, timeout=None)"""
WAITING = "def waiting():\n    print('here')\n    import time; time.sleep(1000)\nrun(waiting, timeout=None)"


class Kernel:
    """A kernel and what its cells show."""

    def __init__(self, folder):
        self.manager = KernelManager(kernel_name="python3")
        env = {**os.environ, "PYTHONPATH": HOME, "LESSONS_HOLD_SECONDS": "30"}
        self.manager.start_kernel(cwd=str(folder), env=env)
        self.connect()

    def connect(self):
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE)

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.manager.provisioner.process.pid)

    def start(self, code: str) -> str:
        return self.client.execute(textwrap.dedent(code))

    def messages(self, request: str, until=lambda kind, content: False) -> list[tuple[str, dict]]:
        """What the cell shows, until it is done or `until` says enough."""
        found = []
        while True:
            message = self.client.get_iopub_msg(timeout=PATIENCE)
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            found.append((kind, content))
            if kind == "status" and content["execution_state"] == "idle" or until(kind, content):
                return found

    def cell(self, code: str) -> list[tuple[str, dict]]:
        return [m for m in self.messages(self.start(code)) if m[0] in ("stream", "error", "execute_result", "display_data")]

    def text(self, code: str) -> str:
        """The cell's text output; it must be text alone."""
        shown = self.cell(code)
        assert {kind for kind, _ in shown} <= {"stream"}, shown
        assert {content["name"] for _, content in shown} <= {"stdout"}, shown
        return "".join(content["text"] for _, content in shown)

    def error(self, request: str) -> dict:
        [content] = [content for kind, content in self.messages(request) if kind == "error"]
        return content

    def run_until_here(self, code: str) -> str:
        """Start a cell; return when its ranks have printed "here"."""
        request = self.start(code)
        self.messages(request, until=lambda kind, content: kind == "stream" and "here" in content["text"])
        return request

    def close(self):
        self.client.stop_channels()
        with contextlib.suppress(RuntimeError, queue.Empty):
            self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    kernel = Kernel(tmp_path_factory.mktemp("notebook"))
    kernel.text("import torch, torch.distributed as dist\nfrom lessons_lib import run")
    yield kernel
    kernel.close()


@pytest.fixture
def own_kernel(tmp_path):
    kernel = Kernel(tmp_path)
    kernel.text("from lessons_lib import run\nrun(lambda: None, ranks=2)\npass")
    yield kernel
    kernel.close()


def ranks_of(kernel) -> list[psutil.Process]:
    template = [p for p in kernel.process.children() if "template" in " ".join(p.cmdline())]
    assert len(template) == 1
    return template[0].children(recursive=True)


def still_there(processes) -> list[psutil.Process]:
    _, alive = psutil.wait_procs(processes, timeout=GONE)
    return [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


# ---- cells -----------------------------------------------------------------------------------------------------------------


def test_functions_classes_and_variables_of_cells(kernel, tmp_path):
    kernel.text("import math\nscale = 3\nclass Point:\n    def __init__(self, x): self.x = x")
    kernel.text("def helper(x): return Point(math.sqrt(x) * scale)")
    kernel.text("def program(k):\n    print('rank', dist.get_rank())\n    return helper(k + dist.get_rank())")
    shown = kernel.text("found = run(program, 16, ranks=2).results\nprint([p.x for p in found], isinstance(found[0], Point))")
    assert shown == f"[rank 0] rank 0\n[rank 1] rank 1\n[12.0, {17**0.5 * 3}] True\n"
    kernel.text("scale = 5")
    assert kernel.text("print(run(program, 16, ranks=1).results[0].x)") == "[rank 0] rank 0\n20.0\n", "the newest value counts"


def test_a_file_beside_the_notebook_works_also_after_it_was_edited(kernel):
    kernel.text("open('beside.py', 'w').write('def f(): return 1\\n'); import beside")
    assert kernel.text("print(run(lambda: beside.f(), ranks=2).results)") == "[1, 1]\n"
    kernel.text("open('beside.py', 'w').write('def f(): return 22\\n'); import importlib; importlib.reload(beside); pass")
    assert kernel.text("print(run(lambda: beside.f(), ranks=2).results)") == "[22, 22]\n"


def test_what_is_stored_is_the_same_every_time(kernel):
    code = """
        import random, time
        def chain():
            x = torch.zeros(1)
            print(f"start {torch.rand(1).item():.3f}")
            time.sleep(random.SystemRandom().choice([0, 0.05]))
            if dist.get_rank() > 0: dist.recv(x, dist.get_rank() - 1)
            print("got", x.item(), sorted({"a", "b"}), list({"a", "b"}))
            x += 1
            if dist.get_rank() < 3: dist.send(x, dist.get_rank() + 1)
            print("end")
        run(chain)
        pass"""
    first = kernel.text(code)
    assert first.splitlines()[:4] == [f"[rank {r}] start 0.496" for r in range(4)]
    got = [f"[rank {r}] got {r}.0 ['a', 'b']" for r in range(4)]
    assert [line.rpartition(" [")[0] for line in first.splitlines() if "got" in line] == got
    for _ in range(3):
        assert kernel.text(code) == first


def test_an_exception_names_the_cell_and_the_next_cell_works(kernel):
    [(kind, content)] = kernel.cell("""
        def broken():
            if dist.get_rank() == 2:
                raise ValueError('bad shape')
            dist.barrier()
        run(broken)""")
    number = kernel.text("print(len(In) - 2)").strip()
    assert (kind, content["ename"]) == ("error", "RankFailed")
    assert content["evalue"].splitlines()[:3] == [
        "rank 2 raised ValueError: bad shape",
        f"  cell {number}, line 3, in broken",
        "    raise ValueError('bad shape')",
    ]
    shown = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(content["traceback"]))
    assert "run(broken)" in shown and "supervise.py" not in shown and "ranks.py" not in shown, "no frame of the launcher"
    assert kernel.text("print(run(lambda: 1, ranks=2).results)") == "[1, 1]\n"


def test_a_deadlock_names_the_cell(kernel):
    [(_, content)] = kernel.cell("""
        def both():
            x = torch.ones(2)
            dist.send(x, 1 - dist.get_rank())
            dist.recv(x, 1 - dist.get_rank())
        run(both, ranks=2)""")
    number = kernel.text("print(len(In) - 2)").strip()
    assert content["ename"] == "Deadlock" and f"(cell {number}, line 3: dist.send(x, 1 - dist.get_rank()))" in content["evalue"]


def test_what_cannot_be_sent_is_named_with_its_cell(kernel):
    [(_, content)] = kernel.cell("import threading\nlock = threading.Lock()\ndef locked():\n    with lock: return 1\nrun(locked)")
    number = kernel.text("print(len(In) - 2)").strip()
    assert content["ename"] == "TypeError"
    assert f"the variable `lock` used by locked() (cell {number}, line 3) is a lock" in content["evalue"]


def test_from_a_thread_and_inside_a_running_event_loop(kernel):
    code = """
        import asyncio, concurrent.futures
        with concurrent.futures.ThreadPoolExecutor() as pool:
            print(pool.submit(run, lambda: 1, ranks=2).result().results)"""
    assert kernel.text(code) == "[1, 1]\n"
    assert kernel.text("await asyncio.sleep(0)\nprint(run(lambda: 2, ranks=2).results)") == "[2, 2]\n"


# ---- interrupt, restart, kill ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [FOREVER, IN_C_CODE, WAITING], ids=["loop", "in C code", "waiting"])
@pytest.mark.parametrize("whole_group", [False, True], ids=["kernel alone", "process group"])
def test_an_interrupt_ends_all_ranks_and_the_next_cell_works(kernel, code, whole_group):
    request = kernel.run_until_here(code)
    ranks = ranks_of(kernel)
    assert len(ranks) == (2 if "stuck" in code else 4)
    if whole_group:
        kernel.manager.interrupt_kernel()
    else:
        os.kill(kernel.process.pid, signal.SIGINT)
    assert kernel.error(request)["ename"] == "KeyboardInterrupt"
    assert still_there(ranks) == []
    assert kernel.text("print(run(lambda: dist.get_rank(), ranks=3).results)") == "[0, 1, 2]\n"


@pytest.mark.parametrize("code", [FOREVER, IN_C_CODE], ids=["loop", "in C code"])
def test_a_kernel_killed_leaves_nothing(own_kernel, code):
    own_kernel.run_until_here(code)
    processes = own_kernel.process.children(recursive=True)
    assert len(processes) >= 3  # the template and its ranks
    folders = list(Path("/tmp").glob(f"lessons-run-{own_kernel.process.pid}-*"))
    os.kill(own_kernel.process.pid, signal.SIGKILL)
    assert still_there(processes) == []
    assert not any(folder.exists() for folder in folders)


def test_a_kernel_restarted_leaves_nothing_and_the_next_cell_works(own_kernel):
    own_kernel.run_until_here(FOREVER)
    processes = own_kernel.process.children(recursive=True)
    own_kernel.client.stop_channels()
    own_kernel.manager.restart_kernel(now=False)
    assert still_there(processes) == []
    own_kernel.connect()
    assert own_kernel.text("from lessons_lib import run\nprint(run(lambda: 1, ranks=2).results)") == "[1, 1]\n"
    processes = own_kernel.process.children(recursive=True)
    own_kernel.client.stop_channels()
    own_kernel.manager.shutdown_kernel()
    assert still_there(processes) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a template")
def test_a_launcher_killed_while_torch_is_loaded_leaves_nothing():
    code = "from lessons_lib.ranks import launch; launch.prepare(); print(launch._template.popen.pid, flush=True); input()"
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, cwd=HOME, text=True)
    with launcher:
        template = psutil.Process(int(launcher.stdout.readline()))
        time.sleep(0.3)  # it is importing now
        launcher.kill()
        assert still_there([template]) == []


def test_spawned_ranks_end_with_their_launcher():
    code = (
        "import time, torch.distributed as dist\nfrom lessons_lib import run\n"
        "def program():\n    print('here')\n    time.sleep(1000)\nrun(program, ranks=2, timeout=None)"
    )
    env = {**os.environ, "LESSONS_START": "spawn"}
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=HOME, env=env, text=True)
    with launcher:
        assert launcher.stdout.readline() == "[rank 0] here\n"
        ranks = psutil.Process(launcher.pid).children(recursive=True)
        assert len(ranks) == 2
        launcher.kill()
        assert still_there(ranks) == []
