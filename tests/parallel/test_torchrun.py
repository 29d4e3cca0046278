"""The hand-written collectives on plain gloo under torchrun, with nothing of the course but lessons_lib/parallel."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """import sys
import torch
import torch.distributed as dist
from lessons_lib.parallel import collectives as c

dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
for size in (1, 7, 1000):
    x = torch.randn(size, dtype=torch.float64)
    total = x.clone()
    dist.all_reduce(total)
    for name in ("naive", "binomial", "ring", "whole_buffer_ring", "halving_doubling", "recursive_doubling"):
        y = x.clone()
        getattr(c, name + "_all_reduce")(y)
        assert torch.allclose(y, total), name
    y = x.clone()
    c.hierarchical_all_reduce(y, *c.node_groups(n // 2))
    assert torch.allclose(y, total)
ours = sorted(m.removeprefix("lessons_lib.") for m in sys.modules if m.startswith("lessons_lib."))
with open(f"rank {rank}.txt", "w") as file:  # four processes that print into one pipe may glue their lines together
    file.write(f"rank {rank} of {n}: {ours}")
dist.destroy_process_group()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="torchrun needs libuv, which some builds of torch for Windows lack")
def test_they_run_under_torchrun_as_they_are(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback}
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(program)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    ours = ["parallel", "parallel.collectives", "parallel.messages", "parallel.rooted"]
    for rank in range(4):
        assert (tmp_path / f"rank {rank}.txt").read_text() == f"rank {rank} of 4: {ours}"
