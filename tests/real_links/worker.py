"""One host: runs a program under plain gloo and prints how long it took. Arguments: rank, hosts, store, program, repeats."""

import importlib.util
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

os.environ["GLOO_SOCKET_IFNAME"] = "link0"
os.environ["OMP_NUM_THREADS"] = "1"

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402


def main(rank: str, hosts: str, store: str, name: str, repeats: str) -> None:
    torch.set_num_threads(1)
    path = Path(__file__).with_name("programs.py")
    spec = importlib.util.spec_from_file_location("programs", path)
    programs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(programs)
    program = getattr(programs, name)
    shared = dist.FileStore(store, int(hosts))
    dist.init_process_group("gloo", store=shared, rank=int(rank), world_size=int(hosts), timeout=timedelta(seconds=120))
    result = program()  # opens the connections
    seconds, alone = [], []  # of the program, and of its computing without messages, in turns
    for _ in range(int(repeats)):
        seconds.append(timed(program))
        if program in programs.COMPUTING:
            alone.append(timed(programs.computing_alone))
    dist.barrier()
    print(json.dumps({"seconds": seconds, "alone": alone, "result": result}), flush=True)
    os._exit(0)


def timed(program) -> float:
    dist.barrier()
    start = time.perf_counter()
    program()
    return time.perf_counter() - start


if __name__ == "__main__":
    main(*sys.argv[1:])
