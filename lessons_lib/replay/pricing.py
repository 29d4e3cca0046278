"""What a cluster makes of a recording: seconds of compute, seconds and ports of each transfer. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..formulas import check_algorithm, group_shape, price
from ..hardware import Cluster
from ..recording import Recording
from .matching import POST, Matching, check, match


@dataclass(eq=False)
class Costs:
    """What a cluster makes of a recording: seconds between operations, seconds and ports of each transfer."""

    after: np.ndarray  # per event: seconds of compute since the rank last came back from waiting
    before: list[float]  # per operation: the same, just before it
    tail: list[float]  # per rank: the same, at its end
    wires: np.ndarray  # per transfer: 0 inside a node, 1 across nodes; of a collective that uses both: 2
    ports: list[tuple[int, ...]]  # per transfer: numbers of ports; 4 x rank + 2 x class + (0 send, 1 receive)
    shapes: list  # per transfer: formulas.group_shape of a collective, None for a message


def fit(recording, cluster, algorithm) -> tuple[Matching, Costs]:
    """Check that recording, cluster and algorithm go together; match and price them."""
    check(recording)
    if not isinstance(cluster, Cluster):
        raise TypeError(f"The second argument must be a hardware.Cluster, such as Cluster(H100), not {cluster!r}.")
    check_algorithm(algorithm)
    if recording.world_size > cluster.world_size:
        raise ValueError(
            f"This recording has {recording.world_size} ranks, but the cluster only {cluster.world_size} devices "
            f"({cluster.nodes} nodes of {cluster.devices_per_node}). Take more nodes or more devices per node."
        )
    matching = match(recording)
    return matching, prepare(recording, matching, cluster)


def compute_seconds(recording: Recording, matching: Matching, device) -> np.ndarray:
    """Per event: seconds of compute, the sum over its operators of count x (larger of the two times + overhead).

    The two: flops / (peak x efficiency), and bytes / memory bandwidth.
    """
    flops = np.array([o.flops for o in recording.operators], dtype=float)
    nbytes = np.array([o.nbytes for o in recording.operators], dtype=float)
    each = np.maximum(flops / (device.flops * device.efficiency), nbytes / device.memory_bandwidth) + device.launch_overhead
    seconds = each[matching.cost_operator] * matching.cost_count
    return np.bincount(matching.cost_event, seconds, minlength=len(matching.events))


def prepare(recording: Recording, matching: Matching, cluster: Cluster) -> Costs:
    """Price the compute and find the ports."""
    m = matching
    seconds = compute_seconds(recording, m, cluster.device)
    waits = np.zeros(len(m.events), dtype=bool)
    waits[m.operations] = m.mode != POST
    after, now, ends = [], 0.0, []
    begin = m.first.tolist()
    seconds, waits = seconds.tolist(), waits.tolist()
    for a, b in zip(begin, begin[1:]):
        now = 0.0
        for i in range(a, b):
            now = 0.0 if waits[i] else now + seconds[i]
            after.append(now)
        ends.append(now)
    after = np.array(after)
    is_first = np.zeros(len(m.events) + 1, dtype=bool)
    is_first[m.first] = True
    before = np.where(is_first[m.operations], 0.0, after[m.operations - 1] if len(after) else 0.0)

    per_node = cluster.devices_per_node
    wires = (m.source // per_node != m.destination // per_node).astype(int)
    out, into = (4 * m.source + 2 * wires).tolist(), (4 * m.destination + 2 * wires + 1).tolist()
    ports = list(zip(out, into))
    shapes: list = [None] * len(ports)
    groups: dict[int, tuple] = {}
    for x in np.flatnonzero(m.destination < 0).tolist():
        group = int(m.group[x])
        if group not in groups:
            members = recording.groups[group]
            shape = n, nodes, _, most = group_shape([r // per_node for r in members])
            classes = () if n == 1 else (0,) if nodes == 1 else (1,) if most == 1 else (0, 1)
            used = tuple(4 * r + 2 * c + d for r in members for c in classes for d in (0, 1))
            groups[group] = (shape, used, 2 if len(classes) == 2 else int(nodes > 1))
        shapes[x], ports[x], wires[x] = groups[group]
    return Costs(after, before.tolist(), ends, wires, ports, shapes)


def durations(recording: Recording, matching: Matching, costs: Costs, intra, inter, algorithm: str) -> list[float]:
    """Seconds of each transfer; `intra` and `inter` are (bandwidth, latency)."""
    m, messages = matching, costs.wires == 0
    with np.errstate(over="ignore"):  # replay says that a time is too large
        out = np.where(messages, intra[1] + m.nbytes / intra[0], inter[1] + m.nbytes / inter[0]).tolist()
    seen: dict[tuple, float] = {}
    for x in np.flatnonzero(m.destination < 0).tolist():
        key = (int(m.op[x]), float(m.nbytes[x]), costs.shapes[x])
        if key not in seen:
            seen[key] = float(price(recording.ops[key[0]], key[1], key[2], intra, inter, algorithm))
        out[x] = seen[key]
    return out
