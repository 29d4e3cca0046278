"""What the tests of data parallel run on ranks: each way to train, for five steps, beside PyTorch's DDP and FSDP2.

All in float64, so that only mistakes differ: AdamW divides small gradients by themselves, and would enlarge rounding.
"""

from functools import cache, partial

import torch
import torch.distributed as dist
from torch.profiler import record_function

from lessons_lib import run, shapes
from lessons_lib.models import Transformer, next_token_loss
from lessons_lib.parallel import data

STEPS = 5
SEQUENCE = 8
BUCKET = 200_000  # bytes: about a third of a block
SAMPLES = {2: 8, 3: 7, 4: 10}  # ranks: samples of a batch, so parts of 4 4, of 3 2 2 and of 3 3 2 2
PARAMETERS = shapes.total_parameters(shapes.TINY)  # tied logits and embedding are one
BLOCK = sum(shapes.layer_parameters(shapes.TINY).values())
adamw = partial(torch.optim.AdamW, lr=0.01)


def model_of(seed=0):
    return Transformer(shapes.TINY, dtype=torch.float64, seed=seed)


def tokens(step, samples):
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(128, (samples, SEQUENCE + 1), generator=generator)


def loss_of(model, batch):
    return next_token_loss(model(batch[:, :-1]), batch[:, 1:])


def values(model):
    return [p.detach().clone() for p in model.parameters()]


def one_process(samples, freeze=(), max_norm=None, steps=STEPS):
    """(gradients of the first step, parameters after the last) of the whole batch in one process."""
    model, first = model_of(), None
    for name in freeze:
        model.get_parameter(name).requires_grad_(False)
    optimizer = adamw(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, tokens(step, samples)).backward()
        first = first or [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        if max_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return first, values(model)


# ---- replicated: each returns (gradients of the first step, parameters after the last) ------------------------------------


def replicated(samples, way, freeze=(), max_norm=None):
    model, first = model_of(seed=dist.get_rank()), None  # every rank starts elsewhere
    data.broadcast_parameters(model)
    for name in freeze:
        model.get_parameter(name).requires_grad_(False)
    optimizer = adamw(model.parameters())
    buckets = data.Buckets(model, BUCKET) if "buckets" in way else None
    for step in range(STEPS):
        batch = tokens(step, samples)
        mine = data.split_batch(batch)
        share = len(mine) / len(batch)
        optimizer.zero_grad()
        with record_function(way):
            if buckets:
                buckets.share = share
            if "accumulated" in way:
                data.accumulate_gradients(partial(loss_of, model), mine.tensor_split(2), buckets)
            elif len(mine):
                loss_of(model, mine).backward()
            if buckets:
                buckets.wait()
            elif "flat" in way:
                data.average_gradients_flat(model, share)
            else:
                data.average_gradients(model, share)
        first = first or [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        if max_norm:
            data.clip_gradients(max_norm, replicated=model.parameters())
        optimizer.step()
    if buckets:
        buckets.remove()
    return first, values(model)


def ddp(samples):
    from torch.nn.parallel import DistributedDataParallel

    model, first = DistributedDataParallel(model_of(), bucket_cap_mb=BUCKET / 2**20), None
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        batch = tokens(step, samples)
        mine = data.split_batch(batch)
        optimizer.zero_grad()
        with record_function("ddp"):  # DDP divides by the ranks: uneven parts need the weight in the loss
            (loss_of(model, mine) * (len(mine) / len(batch) * dist.get_world_size())).backward()
        first = first or [p.grad.clone() for p in model.parameters()]
        optimizer.step()
    return first, values(model)


# ---- sharded -----------------------------------------------------------------------------------------------------------------


def sharded(samples, way, freeze=(), max_norm=None, microbatches=1):
    """(parameters after the last step, counts of elements on this rank by what they are, the norm before the last clip,
    gradients of the first step)"""
    model = model_of()
    for name in freeze:
        model.get_parameter(name).requires_grad_(False)
    units = {} if way == "zero1" else {"modules": model.blocks}
    seen = []  # elements of parameters in memory in the middle of each block's forward and backward

    def look(module, inputs, output):
        seen.append(elements(model)["parameters"])
        output.register_hook(lambda gradient: seen.append(elements(model)["parameters"]))

    for block in model.blocks:
        block.mlp.register_forward_hook(look)
    make = partial({"zero1": data.Zero1, "zero2": data.Zero2, "zero3": data.Zero3}[way], **units)
    zero, norm, first = make(model, make_optimizer=adamw), None, None
    for step in range(STEPS):
        batch = tokens(step, samples)
        mine = data.split_batch(batch)
        zero.share = len(mine) / len(batch)
        with record_function(way):
            data.accumulate_gradients(partial(loss_of, model), mine.tensor_split(microbatches))
            after_backward = elements(model)
            zero.reduce_gradients()
            counts = {"gradients after backward": after_backward["gradients"]}
            counts |= {"gradient shards": sum(shard.grad.numel() for shard in zero.shards)}
            first = first or [shard.grad.clone() for shard in zero.shards]
            if max_norm:
                norm = data.clip_gradients(max_norm, sharded=zero.shards)
            zero.step()
    counts |= {"parameters after backward": after_backward["parameters"], "most parameters": max(seen)}
    counts |= {"parameters": elements(model)["parameters"], "shards": sum(shard.numel() for shard in zero.shards)}
    counts["states"] = sum(t.numel() for state in zero.optimizer.state.values() for t in state.values() if t.dim())
    if way == "zero3":
        zero.gather()
    return values(model), counts, norm, whole_gradients(model, zero, first)


def whole_gradients(model, zero, shards):
    """The gradients of all parameters in the model's order, from every rank's shards of them. Sent outside of the label."""
    found = {}
    for unit, shard in zip(getattr(zero, "units", None) or [zero.unit], shards):
        parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, shard)
        sizes = [p.numel() for p in unit.parameters]
        pieces = torch.cat(parts)[: sum(sizes)].split(sizes)
        found |= {p: piece.view(p.shape) for p, piece in zip(unit.parameters, pieces)}
    return [found.get(p) for p in model.parameters()]


def elements(model):
    """Elements in memory of the parameters that train, and of their gradients."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters() if p.requires_grad}
    gradients = sum(p.grad.numel() for p in model.parameters() if p.grad is not None)
    return {"parameters": sum(storages.values()) // 8, "gradients": gradients}


def fsdp2(samples):
    """(parameters after the last step, gradients of the first)"""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    n = dist.get_world_size()
    mesh, model = init_device_mesh("cpu", (n,)), model_of()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer, first = adamw(model.parameters()), None
    dist.barrier()  # FSDP2 labels its calls itself: those of training are between two barriers
    for step in range(STEPS):
        batch = tokens(step, samples)
        mine = data.split_batch(batch)
        optimizer.zero_grad()
        (loss_of(model, mine) * (len(mine) / len(batch) * n)).backward()
        first = first or [p.grad.detach().clone() for p in model.parameters()]
        optimizer.step()
    dist.barrier()
    return [p.full_tensor().detach() for p in model.parameters()], [gradient.full_tensor() for gradient in first]


REPLICATED = ("one message a parameter", "flat", "buckets", "accumulated, flat", "accumulated, buckets")
SHARDED = ("zero1", "zero2", "zero3")


def every_way(samples):
    """{way: result} of all of them."""
    found = {way: replicated(samples, way) for way in REPLICATED}
    found |= {way: sharded(samples, way) for way in SHARDED}
    return {**found, "ddp": ddp(samples), "fsdp2": fsdp2(samples)}


@cache
def trained(ranks):
    return run(every_way, SAMPLES[ranks], ranks=ranks)


@cache
def alone(samples, **how):
    return one_process(samples, **how)
