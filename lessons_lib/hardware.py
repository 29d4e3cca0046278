"""Devices, links and clusters, and a catalogue of real ones, each value with its source.

Ground floor: imports nothing of ours. Units are plain: FLOP/s, bytes, bytes/s, seconds. A link's bandwidth is per direction and
per device, 1 GB = 1e9 bytes: half of the figure on most data sheets, which add both directions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from numbers import Integral, Real

import numpy as np

INTRA, INTER = 0, 1  # link classes: inside a node, across nodes

# Large matrix products reach 0.87 (A100), 0.80 (H100) and 0.78 (B200) of the dense peak at best, on the best shapes
# [ml-engineering, accelerator benchmarks, "maximum achievable matmul FLOPS"]. The default is the middle one.
DEFAULT_EFFICIENCY = 0.8

# Back-to-back launches of a 2.9 us kernel take 3.8 us each on a V100 [NVIDIA, "Getting Started with CUDA Graphs"]: 0.9 us, rounded.
# The longer time that Python needs to issue an operator is hidden while the device is busy, and is not part of this.
GPU_LAUNCH = 1e-6


def number(value, what: str, allowed: str = "a positive, finite number", low: float = 0.0, closed: bool = False) -> float:
    """`value` as a float above `low` (or equal to it, if `closed`). TypeError or ValueError says what is allowed."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Real):
        raise TypeError(f"{what} must be {allowed}, not {value!r} (a {type(value).__name__}).")
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result) or result < low or (result == low and not closed):
        shown = repr(value) if len(repr(value)) < 40 else "so large a number"
        raise ValueError(f"{what} is {shown}, but must be {allowed}.")
    return result


def whole(value, what: str, low: int, high: int, why: str = "") -> int:
    """`value` as an int within low..high. TypeError or ValueError says what is allowed."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Integral):
        raise TypeError(f"{what} must be a whole number from {low:,} to {high:,}, not {value!r} (a {type(value).__name__}).")
    if not low <= value <= high:
        shown = f"{value:,}" if abs(value) < 10**15 else "far too large"
        raise ValueError(f"{what} is {shown}, but must be a whole number from {low:,} to {high:,}{why}.")
    return int(value)


def _text(value, what: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{what} must be text such as 'NVLink 4', not {value!r} (a {type(value).__name__}).")
    return value


@dataclass(frozen=True)
class Link:
    """A link: `bandwidth` in bytes/s per direction per device, `latency` in seconds per message."""

    bandwidth: float
    latency: float
    name: str = ""
    source: str = field(default="", repr=False, compare=False)

    def __post_init__(self):
        of = f" of the link {self.name!r}" if isinstance(self.name, str) and self.name else " of a link"
        allowed = "a positive, finite number of bytes per second (450e9 is 450 GB/s)"
        object.__setattr__(self, "bandwidth", number(self.bandwidth, f"The bandwidth{of}", allowed))
        allowed = "a finite number of seconds, 0 or more (2e-6 is 2 microseconds)"
        object.__setattr__(self, "latency", number(self.latency, f"The latency{of}", allowed, closed=True))
        _text(self.name, "The name of a link")

    @property
    def title(self) -> str:
        """Name and bandwidth, as shown to a learner: "NVLink 4 (450 GB/s)"; the name alone from 1e18 bytes/s on."""
        if self.name and self.bandwidth >= 1e18:
            return self.name
        return f"{self.name or 'a link'} ({rate(self.bandwidth)})"


@dataclass(frozen=True)
class Device:
    """A device: dense peak `flops` (FLOP/s), `memory` (bytes), `memory_bandwidth` (bytes/s).

    `efficiency` is the fraction of the peak that matrix products reach, above 0 and at most 1. `launch_overhead` is paid by
    every operator (seconds); it is 0 unless given, so that a device made by hand can be checked with pencil and paper.
    """

    flops: float
    memory: float
    memory_bandwidth: float
    efficiency: float = DEFAULT_EFFICIENCY
    name: str = ""
    launch_overhead: float = 0.0
    source: str = field(default="", repr=False, compare=False)

    def __post_init__(self):
        of = f" of the device {self.name!r}" if isinstance(self.name, str) and self.name else " of a device"
        for attribute, what, unit in (
            ("flops", "The peak", "FLOP/s (989e12 is 989 TFLOP/s)"),
            ("memory", "The memory", "bytes (80e9 is 80 GB)"),
            ("memory_bandwidth", "The memory bandwidth", "bytes per second (3.35e12 is 3,350 GB/s)"),
        ):
            value = number(getattr(self, attribute), f"{what}{of}", f"a positive, finite number of {unit}")
            object.__setattr__(self, attribute, value)
        allowed = "a fraction of the peak, above 0 and at most 1"
        value = number(self.efficiency, f"The efficiency{of}", allowed)
        if value > 1:
            raise ValueError(f"The efficiency{of} is {self.efficiency!r}, but must be {allowed}.")
        object.__setattr__(self, "efficiency", value)
        allowed = "a finite number of seconds, 0 or more"
        value = number(self.launch_overhead, f"The launch overhead{of}", allowed, closed=True)
        object.__setattr__(self, "launch_overhead", value)
        _text(self.name, "The name of a device")


def rate(bandwidth: float) -> str:
    """A bandwidth in words, per direction: 450e9 -> "450 GB/s", 1.25e9 -> "1.25 GB/s", 2e6 -> "2 MB/s"."""
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bandwidth >= size:
            return f"{bandwidth / size:,.4g} {unit}" if bandwidth < 1000 * size else f"{bandwidth / size:,.0f} {unit}"
    return f"{bandwidth:.4g} B/s"


# ---- links: per direction and device ---------------------------------------------------------------------------------
# Latency is the time that one more message costs, software included. NVLink 1.9 us, PCIe 2.5 us and InfiniBand 4.0 us are the
# per-step constants of PyTorch's own model of NCCL rings (protocol LL128) [torch/_inductor/comm_analysis.py]; they put the
# floor of a ring all-reduce over 8 GPUs at 27 us (NVLink) and 35 us (PCIe), where 20-60 us is measured. Fast Ethernet takes the
# same model's 14 us for a network under the protocol Simple. 25 us for 10 and 25 Gbit is an assumption: half of a 50 us TCP
# round trip within one rack.
_STEP = "latency: NCCL ring step, torch/_inductor/comm_analysis.py (LL128)"
_GUIDE = "bandwidth: ml-engineering, network/README.md (tables cite vendor pages)"
_LINE = "bandwidth: line rate in bits / 8"
_TCP = "latency: assumed, half of a 50 us TCP round trip within one rack"
_SIMPLE = "latency: NCCL network step, torch/_inductor/comm_analysis.py (Simple)"

NVLINK2 = Link(150e9, 1.9e-6, "NVLink 2", f"{_GUIDE}; {_STEP}")
NVLINK3 = Link(300e9, 1.9e-6, "NVLink 3", f"{_GUIDE}; {_STEP}")
NVLINK4 = Link(450e9, 1.9e-6, "NVLink 4", f"{_GUIDE}; {_STEP}")
NVLINK5 = Link(900e9, 1.9e-6, "NVLink 5", f"{_GUIDE}; {_STEP}")
PCIE3 = Link(15.75e9, 2.5e-6, "PCIe 3 x16", f"bandwidth: 8 GT/s x 16 lanes x 128/130 / 8 bits; {_STEP}")
PCIE4 = Link(31.5e9, 2.5e-6, "PCIe 4 x16", f"{_GUIDE}; {_STEP}")
PCIE5 = Link(63e9, 2.5e-6, "PCIe 5 x16", f"{_GUIDE}; {_STEP}")
IB_HDR = Link(25e9, 4e-6, "InfiniBand HDR", f"{_LINE} (200 Gbit/s port); {_STEP}")
IB_NDR = Link(50e9, 4e-6, "InfiniBand NDR", f"{_LINE} (400 Gbit/s port); {_STEP}")
ETHERNET_10G = Link(1.25e9, 25e-6, "10 Gbit Ethernet", f"{_LINE}; {_TCP}")
ETHERNET_25G = Link(3.125e9, 25e-6, "25 Gbit Ethernet", f"{_LINE}; {_TCP}")
ETHERNET_100G = Link(12.5e9, 14e-6, "100 Gbit Ethernet", f"{_LINE}; {_SIMPLE}")
ETHERNET_400G = Link(50e9, 14e-6, "400 Gbit Ethernet", f"{_LINE}; {_SIMPLE}")

LINKS = (ETHERNET_10G, ETHERNET_25G, ETHERNET_100G, PCIE3, IB_HDR, PCIE4, IB_NDR, ETHERNET_400G, PCIE5, NVLINK2, NVLINK3, NVLINK4,
         NVLINK5)  # fmt: skip

# ---- devices: dense bf16 or fp16 peak (data sheets often print twice that, for sparse matrices) ----------------------------
# Efficiency is the highest matrix-product rate measured, over the peak, where somebody measured it: A100 271.2 / 312, H100
# 794.5 / 989, B200 1745 / 2250 TFLOP/s [ml-engineering]; H200 has the H100's chip, and 828.6 / 989 was measured on a GH200.
# Others take the default.
_TABLE = "ml-engineering, compute/accelerator/README.md (tables cite vendor pages)"
_SHEETS = "vendor data sheet, as repeated by two specification sites"

T4 = Device(65e12, 16e9, 320e9, DEFAULT_EFFICIENCY, "T4", GPU_LAUNCH, f"{_SHEETS}; fp16")
V100 = Device(125e12, 32e9, 900e9, DEFAULT_EFFICIENCY, "V100", GPU_LAUNCH, "llm-analysis, gpu_configs (SXM2, 32 GB; fp16)")
# 165 with sums in fp32, as training needs; 330 is for sparse matrices, or for sums in fp16.
RTX4090 = Device(165e12, 24e9, 1008e9, DEFAULT_EFFICIENCY, "RTX 4090", GPU_LAUNCH, _SHEETS)
A100 = Device(312e12, 80e9, 2000e9, 0.87, "A100", GPU_LAUNCH, f"{_TABLE}; SXM, 80 GB")
# The vendor's data sheet says 362 TFLOP/s dense, 864 GB/s, 48 GB; the table rounds the bandwidth to 860.
L40S = Device(362e12, 48e9, 864e9, DEFAULT_EFFICIENCY, "L40S", GPU_LAUNCH, "vendor data sheet")
H100 = Device(989e12, 80e9, 3350e9, 0.80, "H100", GPU_LAUNCH, f"{_TABLE}; SXM")
H200 = Device(989e12, 141e9, 4800e9, 0.80, "H200", GPU_LAUNCH, f"{_TABLE}; SXM")
B200 = Device(2250e12, 180e9, 8000e9, 0.78, "B200", GPU_LAUNCH, f"{_TABLE}; SXM")
# One core of a laptop, since every rank runs one thread: 3.1 GHz x 2 units x 8 fp32 lanes x 2 (multiply and add) = 99 GFLOP/s;
# a quarter of 51.2 GB/s (two channels of DDR4-3200) and of 16 GB, for four ranks share them. 1 us: one addition of two numbers
# in PyTorch on one thread.
LAPTOP = Device(99.2e9, 4e9, 12.8e9, DEFAULT_EFFICIENCY, "laptop core", 1e-6, "arithmetic on a common laptop's clock and memory")

DEVICES = (LAPTOP, T4, V100, RTX4090, A100, L40S, H100, H200, B200)  # in rising peak


@dataclass(frozen=True)
class Cluster:
    """`nodes` machines with `devices_per_node` devices each.

    Ranks fill one node after the other: rank r is on node r // devices_per_node.
    Any two devices of a node talk over `intra_node`, devices of two nodes over `inter_node`.
    """

    device: Device
    nodes: int = 1
    devices_per_node: int = 8
    intra_node: Link = NVLINK4
    inter_node: Link = IB_NDR

    def __post_init__(self):
        if not isinstance(self.device, Device):
            raise TypeError(f"A cluster is made of a Device, such as hardware.H100, not {self.device!r}.")
        for name in ("intra_node", "inter_node"):
            if not isinstance(getattr(self, name), Link):
                raise TypeError(f"{name} must be a Link, such as hardware.NVLINK4, not {getattr(self, name)!r}.")
        object.__setattr__(self, "nodes", whole(self.nodes, "The number of nodes", 1, 1_000_000))
        what = "The number of devices per node"
        object.__setattr__(self, "devices_per_node", whole(self.devices_per_node, what, 1, 1_000_000))

    @property
    def world_size(self) -> int:
        """How many devices, and so how many ranks at most."""
        return self.nodes * self.devices_per_node

    def node_of(self, rank: int) -> int:
        """The node that a rank is on."""
        return (
            whole(rank, "The rank", 0, self.world_size - 1, f": this cluster has {self.world_size} devices")
            // self.devices_per_node
        )

    def link(self, a: int, b: int) -> Link:
        """The link between two ranks."""
        if self.node_of(a) == self.node_of(b):
            if a == b:
                raise ValueError(f"Rank {a} needs no link to itself: name two different ranks.")
            return self.intra_node
        return self.inter_node
