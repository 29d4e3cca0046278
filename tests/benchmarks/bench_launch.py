"""How long ranks take to start, beside multiprocessing's spawn, and what thirty kernels with four ranks each cost.

python tests/benchmarks/bench_launch.py                 # ratio of a warm run to spawn, same function, same ranks
python tests/benchmarks/bench_launch.py --kernels 30    # thirty real kernels at once: memory and time
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

HOME = str(Path(__file__).resolve().parents[2])
sys.path.insert(0, HOME)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402


def step() -> float:
    """The function that both start: one training step, gradients summed over the ranks."""
    model = torch.nn.Linear(32, 32)
    model(torch.ones(4, 32)).sum().backward()
    dist.all_reduce(model.weight.grad)
    return float(model.weight.grad.sum())


def _spawned(rank: int, world_size: int, folder: str, queue) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    queue.put((rank, step()))
    dist.destroy_process_group()


def with_spawn(world_size: int) -> list[float]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        queue = context.Queue()
        processes = [context.Process(target=_spawned, args=(r, world_size, folder, queue)) for r in range(world_size)]
        for process in processes:
            process.start()
        results = dict(queue.get() for _ in processes)
        for process in processes:
            process.join()
    return [results[r] for r in range(world_size)]


def seconds(call, times: int) -> tuple[list[float], object]:
    found, result = [], None
    for _ in range(times):
        begun = time.perf_counter()
        result = call()
        found.append(time.perf_counter() - begun)
    return found, result


def compare(world_size: int) -> None:
    from lessons_lib import run

    [first], _ = seconds(lambda: run(step, ranks=world_size), 1)
    ours, mine = seconds(lambda: run(step, ranks=world_size).results, 9)
    spawn, theirs = seconds(lambda: with_spawn(world_size), 3)
    assert mine == theirs, (mine, theirs)
    ratio = statistics.median(spawn) / statistics.median(ours)
    print(f"{world_size} ranks, one training step, measured here (median of {len(ours)} and {len(spawn)}):")
    print(f"  run(), first in a process   {first:7.3f} s")
    print(f"  run(), warm                 {statistics.median(ours):7.3f} s   (worst {max(ours):.3f})")
    print(f"  multiprocessing, spawn      {statistics.median(spawn):7.3f} s")
    print(f"  spawn / run() = {ratio:.1f}   (at least 10 is asked for)")


# ---- thirty kernels ------------------------------------------------------------------------------------------------------

CELL = """
import time, torch, torch.distributed as dist
from lessons_lib import run
def program():
    x = torch.ones(1000)
    dist.all_reduce(x)
    time.sleep({sleep})
    dist.all_reduce(x)
    return float(x[0])
begun = time.perf_counter()
assert run(program, timeout=None).results == [16.0] * 4
cold = time.perf_counter() - begun - {sleep}
"""
AGAIN = "begun = time.perf_counter(); run(lambda: 1, timeout=None); print(cold, time.perf_counter() - begun)"


def kernels(count: int) -> None:
    import psutil
    from jupyter_client import KernelManager

    begun = time.perf_counter()
    managers, clients = [], []
    try:
        for _ in range(count):
            manager = KernelManager(kernel_name="python3")
            manager.start_kernel(cwd=HOME)
            managers.append(manager)
        for manager in managers:
            client = manager.client()
            client.start_channels()
            client.wait_for_ready(timeout=300)
            clients.append(client)
        ready = time.perf_counter()
        requests = [client.execute(CELL.format(sleep=20)) for client in clients]
        wanted, most = count * 5, 0  # template and four ranks each
        while most < wanted and time.perf_counter() - ready < 600:
            time.sleep(1)
            children = [psutil.Process(m.provisioner.process.pid).children(recursive=True) for m in managers]
            most = max(most, sum(map(len, children)))
        memory = {"kernels": 0, "templates": 0, "ranks": 0}
        for manager in managers:
            kernel = psutil.Process(manager.provisioner.process.pid)
            memory["kernels"] += _pss(kernel)
            for template in kernel.children():
                memory["templates"] += _pss(template)
                memory["ranks"] += sum(map(_pss, template.children()))
        for client, request in zip(clients, requests):
            assert _reply(client, request)["status"] == "ok"
        done = time.perf_counter()
        print(f"{count} kernels with 4 ranks each, at once, on {os.cpu_count()} cores, measured here:")
        print(f"  {most} processes beside the kernels; all kernels ready after {ready - begun:.0f} s")
        print(f"  all runs, with 20 s of sleep in each, done after {done - begun:.0f} s")
        for name, size in memory.items():
            print(f"  memory (PSS) of {name:10} {size / 1e9:6.2f} GB   ({size / 1e6 / count:.0f} MB a kernel)")
        requests = [client.execute(AGAIN) for client in clients]
        texts = [_output(client, request) for client, request in zip(clients, requests)]
        warm = sorted(float(text.split()[1]) for text in texts)
        print(f"  a second run, all kernels at once: median {statistics.median(warm):.2f} s, slowest {warm[-1]:.2f} s")
    finally:
        left = [p for m in managers for p in psutil.Process(m.provisioner.process.pid).children(recursive=True)]
        for client in clients:
            client.stop_channels()
        ended = time.perf_counter()
        for manager in managers:
            os.kill(manager.provisioner.process.pid, 9)
        _, alive = psutil.wait_procs(left, timeout=30)
        print(f"  killed -9: {len(alive)} of {len(left)} processes left after {time.perf_counter() - ended:.1f} s")
        for manager in managers:
            manager.shutdown_kernel(now=True)


def _pss(process) -> int:
    import psutil

    try:
        return process.memory_full_info().pss
    except psutil.Error:
        return 0


def _reply(client, request) -> dict:
    while True:
        message = client.get_shell_msg(timeout=600)
        if message["parent_header"].get("msg_id") == request:
            return message["content"]


def _output(client, request) -> str:
    text = ""
    while True:
        message = client.get_iopub_msg(timeout=600)
        if message["parent_header"].get("msg_id") == request:
            if message["msg_type"] == "stream":
                text += message["content"]["text"]
            elif message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                return text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kernels", type=int, default=0)
    arguments = parser.parse_args()
    kernels(arguments.kernels) if arguments.kernels else compare(arguments.ranks)
