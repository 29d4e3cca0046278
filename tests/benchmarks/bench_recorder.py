"""What recording costs: a data-parallel training step recorded, against the same step on plain gloo.

Both run in the same two ranks, in turns, so that a noisy machine slows both. Prints the ratio of the medians.
"""

import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes


def step_seconds(width, length, batch, layers, rounds=12):
    """Median seconds of one step: (recorded, plain)."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True), layers, enable_nested_tensor=False
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(batch, length, width)
    inner = dist.group.WORLD.inner

    def step(reduce):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        for p in model.parameters():
            reduce(p.grad)
        optimizer.step()

    def plain(grad):
        inner.allreduce(grad).wait()

    times = {"recorded": [], "plain": []}
    for turn in range(rounds + 2):
        dist.barrier()
        start = time.perf_counter()
        step(dist.all_reduce)
        middle = time.perf_counter()
        with _disable_current_modes():
            step(plain)
        end = time.perf_counter()
        if turn >= 2:
            times["recorded"].append(middle - start)
            times["plain"].append(end - middle)
    return statistics.median(times["recorded"]), statistics.median(times["plain"])


def main():
    from lessons_lib import run

    for width, length, batch in ((256, 128, 8), (64, 128, 8), (64, 32, 4)):
        recorded, plain = run(step_seconds, width, length, batch, 4, ranks=2, timeout=None).results[0]
        print(
            f"training step, 4 layers, {width} wide, {length} long, batch {batch}, 2 ranks: recorded {recorded * 1e3:.1f} ms, "
            f"plain gloo {plain * 1e3:.1f} ms, ratio {recorded / plain:.3f}"
        )


if __name__ == "__main__":
    main()
