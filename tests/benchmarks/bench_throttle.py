"""Throttled runs against the replay on the same link: wall clock (measured) over virtual time (replayed).

Messages are large, so that communication dominates; the ratio is meant to lie within 0.9 and 1.1.
"""

import torch
import torch.distributed as dist

from lessons_lib import Cluster, Link, measured, replay, run
from lessons_lib.hardware import LAPTOP

LINK = Link(bandwidth=5e6, latency=2e-3, name="5 MB/s, 2 ms")
ELEMENTS = 1_000_000  # 4 MB: 0.8 s on that link


def ring_all_reduce():
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = list(torch.ones(ELEMENTS).chunk(n))
    for step in range(2 * (n - 1)):
        incoming = torch.empty_like(chunks[0])
        handle = dist.isend(chunks[(rank - step) % n], (rank + 1) % n)
        dist.recv(incoming, (rank - 1) % n)
        handle.wait()
        chunks[(rank - step - 1) % n] += incoming


def chain_of_sends():
    rank, n = dist.get_rank(), dist.get_world_size()
    x = torch.ones(ELEMENTS)
    if rank > 0:
        dist.recv(x, rank - 1)
    if rank < n - 1:
        dist.send(x, rank + 1)


def data_parallel_step():
    model = torch.nn.Linear(1000, 1000)
    model(torch.ones(8, 1000)).square().mean().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)


def overlapped_buckets():
    """DistributedDataParallel: its buckets travel while backward goes on."""
    model = torch.nn.Sequential(torch.nn.Linear(700, 700), torch.nn.Linear(700, 700))
    model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    for _ in range(2):
        model(torch.ones(8, 700)).square().mean().backward()


def main():
    cluster = Cluster(LAPTOP, nodes=1, devices_per_node=4, intra_node=LINK)
    for program in (ring_all_reduce, chain_of_sends, data_parallel_step, overlapped_buckets):
        recordings = [run(program, ranks=4, throttle=LINK, timeout=120) for _ in range(3)]
        # a machine that is busy elsewhere only makes a run slower: the fastest of three is the least disturbed
        wall, virtual = min(measured(r).step_time for r in recordings), replay(recordings[0], cluster).step_time
        print(f"{program.__name__:20s} measured {wall:.3f} s, replayed {virtual:.3f} s, ratio {wall / virtual:.3f}")


if __name__ == "__main__":
    main()
