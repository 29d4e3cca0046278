"""The process group that records: every spelling of every operation, with gloo underneath.

torch.distributed reaches a Python process group by method; a method that is not overridden would run unrecorded, so
each is here, under today's names and the older ones.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..errors import BufferMisuse
from ..watch import complaints
from . import pieces
from .callers import calling_line
from .handles import Handle, Several

WORLD = "world"  # the label of the group of all ranks that is there from the start
REDUCE = {name: getattr(dist.ReduceOp, name) for name in ("SUM", "AVG", "MAX", "MIN", "PRODUCT", "BAND", "BOR", "BXOR")}


def nbytes(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def numel(tensors) -> int:
    return sum(t.numel() for t in tensors)


def flat(tensors) -> list:
    """Tensors out of a tensor, a list, or a list of lists."""
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [t for part in tensors for t in flat(part)]


def option(args, kwargs, field: str, keyword: str, default=None):
    """An option, whether it came in an options object or as a keyword."""
    for value in (*args, kwargs.get("opts")):
        if hasattr(value, field):
            return getattr(value, field)
    return kwargs.get(keyword, default)


def reduction(args, kwargs) -> str:
    found = option(args, kwargs, "reduceOp", "op", dist.ReduceOp.SUM)
    return next((name for name, op in REDUCE.items() if found == op), str(found))


class RecordedGroup(dist.ProcessGroup):
    """`ranks` are the members' global ranks, `label` names the group, `inner` is gloo (or a fake that moves nothing)."""

    def __init__(self, recorder, rank: int, ranks: tuple[int, ...], label: str, inner):
        super().__init__(rank, len(ranks))
        self.recorder, self.ranks, self.label, self.inner = recorder, ranks, label, inner
        # DDP's C++ asks for the back end of type gloo by number; without one a Python group has no name either
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, inner)
        self.alias = "" if label == WORLD else label  # (a process group has a method `name` already)
        self._batch: list[Handle] | None = None

    def getBackendName(self) -> str:
        return "gloo"

    def __repr__(self) -> str:
        return f"of ranks {list(self.ranks)}"  # in messages, "... is not part of group <...>"; an address differs every time

    def _post(self, op: str, reads, writes, method: str, args, kwargs, **facts) -> Handle:
        reads, writes = flat(reads), flat(writes)
        facts.setdefault("numel", numel(reads))
        facts.setdefault("nbytes", nbytes(reads))

        def issue():
            # gloo's own threads take over this thread's dispatch state: what they copy is not the program's computing
            with torch._C._DisableTorchDispatch():
                return getattr(self.inner, method)(*args, **kwargs)

        handle = self.recorder.post(op, self, reads, writes, issue=issue, **facts)
        if self._batch is not None:
            self._batch.append(handle)
        return handle

    def _global(self, rank: int) -> int:
        if not 0 <= rank < len(self.ranks):
            raise ValueError(complaints.no_such_rank(rank, len(self.ranks)))
        return self.ranks[rank]

    def _other(self, rank: int) -> int:
        if self._global(rank) == self.recorder.rank:
            raise ValueError(complaints.to_itself(self.recorder.rank))
        return self.ranks[rank]

    def _check_apart(self, op: str, outputs, inputs=()) -> None:
        if kind := pieces.shared(outputs, inputs):
            where, _, name = calling_line()
            raise BufferMisuse(complaints.shared_memory(self.recorder.rank, name or op, where, kind))

    # ---- messages -----------------------------------------------------------------------------------------------------

    def send(self, tensors, dstRank, tag=0):
        return self._post("send", tensors, [], "send", (tensors, dstRank, tag), {}, peer=self._other(dstRank), tag=tag)

    def recv(self, tensors, srcRank, tag=0):
        return self._post(
            "recv", [], tensors, "recv", (tensors, srcRank, tag), {}, peer=self._other(srcRank), tag=tag,
            numel=numel(tensors), nbytes=nbytes(tensors),
        )  # fmt: skip

    def recv_anysource(self, tensors, tag=0):
        handle = self._post(
            "recv", [], tensors, "recv_anysource", (tensors, tag), {}, tag=tag, numel=numel(tensors), nbytes=nbytes(tensors)
        )
        handle.from_any = True
        return handle

    # ---- one tensor on every rank ----------------------------------------------------------------------------------------

    def allreduce(self, tensors, *args, **kwargs):
        return self._reduce_in_place("allreduce", tensors, args, kwargs)

    def allreduce_coalesced(self, tensors, *args, **kwargs):
        return self._reduce_in_place("allreduce_coalesced", tensors, args, kwargs)

    def _reduce_in_place(self, method, tensors, args, kwargs):
        how = reduction(args, kwargs)
        return self._post("all_reduce", tensors, tensors, method, (tensors, *args), kwargs, reduce=how)

    def broadcast(self, tensors, *args, **kwargs):
        root = self._root(args, kwargs)
        reads, writes = (tensors, []) if root == self.recorder.rank else ([], tensors)
        size = {"numel": numel(flat(tensors)), "nbytes": nbytes(flat(tensors))}
        return self._post("broadcast", reads, writes, "broadcast", (tensors, *args), kwargs, peer=root, **size)

    def reduce(self, tensors, *args, **kwargs):
        root, how = self._root(args, kwargs), reduction(args, kwargs)
        # gloo also changes the tensor on ranks that are not the root
        return self._post("reduce", tensors, tensors, "reduce", (tensors, *args), kwargs, peer=root, reduce=how)

    def _root(self, args, kwargs) -> int:
        root = option(args, kwargs, "rootRank", "root")
        if root is None:
            root = next(a for a in args if isinstance(a, int))
        return self._global(root)

    # ---- pieces ---------------------------------------------------------------------------------------------------------

    def allgather(self, output_tensors, input_tensors, *args, **kwargs):
        call = ((output_tensors, input_tensors, *args), kwargs)
        for outputs, own in zip(output_tensors, input_tensors):
            pieces.check_list("all_gather", "output", outputs, own, len(self.ranks))
            self._check_apart("all_gather", outputs)
        return self._post("all_gather", input_tensors, output_tensors, "allgather", *call, nbytes=nbytes(flat(output_tensors)))

    def all_gather_single(self, output, input, *args, **kwargs):
        pieces.check_gathered("all_gather_into_tensor", output, input, len(self.ranks))
        call = ((output, input, *args), kwargs)
        return self._post("all_gather", input, output, "_allgather_base", *call, nbytes=nbytes([output]))

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs, inputs, *args, **kwargs):
        return Several([self.all_gather_single(o, i, *args, **kwargs) for o, i in zip(outputs, inputs)])

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, output_lists, input_list, *args, **kwargs):
        call = ((output_lists, input_list, *args), kwargs)
        return self._post("all_gather", input_list, output_lists, "allgather_coalesced", *call, nbytes=nbytes(flat(output_lists)))

    def reduce_scatter(self, output_tensors, input_tensors, *args, **kwargs):
        call, how = ((output_tensors, input_tensors, *args), kwargs), reduction(args, kwargs)
        for own, inputs in zip(output_tensors, input_tensors):
            pieces.check_reduced("reduce_scatter", own, inputs, self.rank(), len(self.ranks))
        return self._post("reduce_scatter", input_tensors, output_tensors, "reduce_scatter", *call, reduce=how)

    def reduce_scatter_single(self, output, input, *args, **kwargs):
        call, how = ((output, input, *args), kwargs), reduction(args, kwargs)
        pieces.check_scattered("reduce_scatter_tensor", output, input, len(self.ranks))
        return self._post("reduce_scatter", input, output, "_reduce_scatter_base", *call, reduce=how)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs, inputs, *args, **kwargs):
        return Several([self.reduce_scatter_single(o, i, *args, **kwargs) for o, i in zip(outputs, inputs)])

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def gather(self, output_tensors, input_tensors, *args, **kwargs):
        call, root = ((output_tensors, input_tensors, *args), kwargs), self._root(args, kwargs)
        if root == self.recorder.rank:
            pieces.check_list("gather", "output", flat(output_tensors), flat(input_tensors)[0], len(self.ranks))
            self._check_apart("gather", flat(output_tensors))
        total = nbytes(flat(input_tensors)) * len(self.ranks)
        return self._post("gather", input_tensors, output_tensors, "gather", *call, peer=root, nbytes=total)

    def scatter(self, output_tensors, input_tensors, *args, **kwargs):
        call, root = ((output_tensors, input_tensors, *args), kwargs), self._root(args, kwargs)
        piece = flat(output_tensors)
        if root == self.recorder.rank:
            pieces.check_list("scatter", "input", flat(input_tensors), piece[0], len(self.ranks))
        size = {"numel": numel(piece), "nbytes": nbytes(piece) * len(self.ranks)}
        return self._post("scatter", input_tensors, output_tensors, "scatter", *call, peer=root, **size)

    # ---- all to all -----------------------------------------------------------------------------------------------------

    def all_to_all_single(self, output, input, output_split_sizes=(), input_split_sizes=(), *args, **kwargs):
        call = ((output, input, list(output_split_sizes), list(input_split_sizes), *args), kwargs)
        n = len(self.ranks)
        self._check_apart("all_to_all_single", [output], [input])
        sent = pieces.pieces("all_to_all_single", "input", input, input_split_sizes, n)
        splits = (sent, pieces.pieces("all_to_all_single", "output", output, output_split_sizes, n))
        return self._post("all_to_all", input, output, "alltoall_base", *call, splits=splits)

    alltoall_base = all_to_all_single

    def alltoall(self, output_tensors, input_tensors, *args, **kwargs):
        pieces.check_exchanged("all_to_all", output_tensors, input_tensors, len(self.ranks))
        self._check_apart("all_to_all", output_tensors, input_tensors)
        splits = (tuple(t.numel() for t in input_tensors), tuple(t.numel() for t in output_tensors))
        call = ((output_tensors, input_tensors, *args), kwargs)
        return self._post("all_to_all", input_tensors, output_tensors, "alltoall", *call, splits=splits)

    # ---- no tensors -----------------------------------------------------------------------------------------------------

    def barrier(self, *args, **kwargs):
        return self._post("barrier", [], [], "barrier", args, kwargs)

    def monitored_barrier(self, timeout=None, wait_all_ranks=False):
        """gloo's barrier that names the rank that is missing; here the launcher names it sooner."""
        self._post("barrier", [], [], "barrier", (), {}).wait()

    def _start_coalescing(self, device=None):
        self._batch = []

    def _end_coalescing(self, device=None):
        batch, self._batch = self._batch, None
        return Several(batch or [])

    # ---- housekeeping ---------------------------------------------------------------------------------------------------

    def shutdown(self):
        if hasattr(self.inner, "shutdown"):
            self.inner.shutdown()

    def abort(self):
        if hasattr(self.inner, "abort"):
            self.inner.abort()


def install(recorder) -> None:
    """Make torch.distributed build recorded groups where it would build gloo's, and note calls of new_group.

    Programs still see the back end "gloo": what they ask it for by name (monitored_barrier, new_group(backend="gloo"),
    device meshes) works, and is recorded.
    """
    build, new_group = c10d._new_process_group_helper, c10d._new_group_with_tag

    def create(options, _):
        ranks = tuple(options.global_ranks_in_group) or tuple(range(recorder.world_size))
        rank, size = options.group_rank, options.group_size
        if recorder.shapes_only:
            from torch._C._distributed_c10d import FakeProcessGroup

            inner = FakeProcessGroup._create_internal(rank, size, FakeProcessGroup.Options())
        else:
            inner = dist.ProcessGroupGloo(options.store, rank, size, timeout=options.timeout)
        label = str(options.group_id) if options.global_ranks_in_group else WORLD
        return RecordedGroup(recorder, rank, ranks, label, inner)

    def recorded_build(group_size, group_rank, ranks, backend, store, *args, **kwargs):
        kind = str(backend).lower()
        if kind in ("gloo", "cpu:gloo", "undefined"):
            backend = dist.Backend("recorded")
        group, prefix = build(group_size, group_rank, ranks, backend, store, *args, **kwargs)
        if isinstance(group, RecordedGroup):
            c10d._world.pg_map[group] = (dist.Backend.GLOO, c10d._world.pg_map[group][1])
            c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(dist.Backend.GLOO))
        return group, prefix

    def noted_new_group(ranks=None, *args, use_local_synchronization=False, **kwargs):
        members = sorted(map(int, ranks)) if ranks is not None else list(range(recorder.world_size))
        if not members:
            raise ValueError("new_group([]): name at least one rank, for example dist.new_group([0, 1]).")
        noted = not use_local_synchronization and set(members) <= set(range(recorder.world_size))
        if noted:  # else PyTorch says what is wrong
            recorder.notes.write("group", members, calling_line()[0])
        group = new_group(ranks, *args, use_local_synchronization=use_local_synchronization, **kwargs)
        if noted:
            recorder.notes.write("made")
        return group

    if "RECORDED" not in dist.Backend._plugins:
        dist.Backend.register_backend("recorded", create, extended_api=True, devices=["cpu"])
    c10d._new_process_group_helper, c10d._new_group_with_tag = recorded_build, noted_new_group
