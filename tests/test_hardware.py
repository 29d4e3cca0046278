"""The catalogue against the data it was taken from, and what bad values are told."""

import csv
import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from lessons_lib import hardware
from lessons_lib.hardware import DEVICES, H100, IB_NDR, LINKS, NVLINK4, Cluster, Device, Link, rate

DATA = list(csv.DictReader((Path(__file__).parent / "data" / "hardware.csv").open(encoding="utf-8")))
DEVICE_ROWS = {
    "A100": "A100-SXM-80GB", "H100": "H100-SXM", "H200": "H200-SXM", "B200": "B200-SXM", "L40S": "L40S", "V100": "V100-SXM2",
    "RTX4090": "RTX 4090", "T4": "T4",
}  # fmt: skip
LINK_ROWS = {
    "NVLINK2": "NVLink 2", "NVLINK3": "NVLink 3", "NVLINK4": "NVLink 4", "NVLINK5": "NVLink 5", "PCIE3": "PCIe 3 x16",
    "PCIE4": "PCIe 4 x16", "PCIE5": "PCIe 5 x16", "IB_HDR": "IB HDR", "IB_NDR": "IB NDR", "ETHERNET_10G": "Ethernet 10G",
    "ETHERNET_25G": "Ethernet 25G", "ETHERNET_100G": "Ethernet 100G", "ETHERNET_400G": "Ethernet 400G",
}  # fmt: skip


def value(name: str, *quantities: str) -> float | None:
    found = [float(row["value"]) for row in DATA if row["name"] == name and row["quantity"] in quantities]
    return found[0] if found else None


@pytest.mark.parametrize("constant, row", DEVICE_ROWS.items())
def test_device_has_the_published_values(constant, row):
    device = getattr(hardware, constant)
    assert device.flops == pytest.approx(value(row, "peak_bf16_fp16_dense") * 1e12, rel=0.002)  # RTX 4090: 165.15, told as 165
    assert device.memory_bandwidth == pytest.approx(value(row, "hbm_bandwidth") * 1e9, rel=0.005)  # L40S: 864, rounded to 860
    assert device.memory == value(row, "memory") * 1e9
    assert device.source and device.launch_overhead > 0


@pytest.mark.parametrize("constant, row", [(c, r) for c, r in DEVICE_ROWS.items() if value(r, "measured_max_matmul_bf16")])
def test_efficiency_is_the_best_measured_matrix_product(constant, row):
    device = getattr(hardware, constant)
    assert device.efficiency * device.flops / 1e12 == pytest.approx(value(row, "measured_max_matmul_bf16"), rel=0.01)


@pytest.mark.parametrize("constant, row", LINK_ROWS.items())
def test_link_has_the_published_bandwidth_per_direction(constant, row):
    link = getattr(hardware, constant)
    assert link.bandwidth == value(row, "per_direction_bandwidth", "per_direction_bandwidth_per_gpu") * 1e9
    assert link.source


def test_latencies_are_those_of_the_named_model():
    model = "torch inductor NCCL model"
    for links, quantity in (
        (("NVLINK2", "NVLINK3", "NVLINK4", "NVLINK5"), "hw_latency_nvlink_ring_LL128"),
        (("PCIE3", "PCIE4", "PCIE5"), "hw_latency_pci_ring_LL128"),
        (("IB_HDR", "IB_NDR"), "hw_latency_net_ring_LL128"),
        (("ETHERNET_100G", "ETHERNET_400G"), "hw_latency_net_ring_Simple"),
    ):
        assert [getattr(hardware, name).latency for name in links] == pytest.approx([value(model, quantity) * 1e-6] * len(links))


def test_nvlink_4_is_nine_times_an_ndr_port_and_not_eighteen():
    assert NVLINK4.bandwidth / IB_NDR.bandwidth == 9


def test_tuples_for_sliders_are_complete_and_rise():
    links = {v for v in vars(hardware).values() if isinstance(v, Link)}
    devices = {v for v in vars(hardware).values() if isinstance(v, Device)}
    assert set(LINKS) == links and len(LINKS) == len(links)
    assert set(DEVICES) == devices and len(DEVICES) == len(devices)
    assert [x.bandwidth for x in LINKS] == sorted(x.bandwidth for x in LINKS)
    assert [x.flops for x in DEVICES] == sorted(x.flops for x in DEVICES)
    assert len({x.name for x in (*LINKS, *DEVICES)}) == len(LINKS) + len(DEVICES)


def test_cluster_places_ranks_node_by_node():
    cluster = Cluster(H100, nodes=3, devices_per_node=4)
    assert cluster.world_size == 12
    assert [cluster.node_of(r) for r in range(12)] == [0] * 4 + [1] * 4 + [2] * 4
    assert cluster.link(0, 3) is NVLINK4 and cluster.link(3, 4) is IB_NDR and cluster.link(11, 0) is IB_NDR
    for call in (lambda: cluster.node_of(12), lambda: cluster.link(0, 12), lambda: cluster.link(-1, 0), lambda: cluster.link(5, 5)):
        with pytest.raises(ValueError, match="[Rr]ank"):
            call()


def test_replace_works_and_checks_again():
    slow = dataclasses.replace(NVLINK4, bandwidth=np.float64(3e10))
    assert slow.bandwidth == 3e10 and type(slow.bandwidth) is float and slow.latency == NVLINK4.latency
    assert dataclasses.replace(Cluster(H100), intra_node=slow).intra_node is slow
    with pytest.raises(ValueError, match="bandwidth of the link 'NVLink 4' is -1.*positive"):
        dataclasses.replace(NVLINK4, bandwidth=-1)


def test_a_device_made_by_hand_has_no_hidden_cost():
    assert Device(1e9, 1e9, 1e9).launch_overhead == 0.0


NOT_POSITIVE = [0, -1, math.nan, math.inf, -math.inf, 10**400]
NOT_NUMBERS = [True, "1e9", None, [1], 1j, np.array([1.0]), np.bool_(True)]


@pytest.mark.parametrize("bad", NOT_POSITIVE + NOT_NUMBERS, ids=repr)
@pytest.mark.parametrize(
    "make, what",
    [
        (lambda v: Link(v, 0), "bandwidth of a link"),
        (lambda v: Device(v, 1, 1), "peak of a device"),
        (lambda v: Device(1, v, 1), "memory of a device"),
        (lambda v: Device(1, 1, v), "memory bandwidth of a device"),
        (lambda v: Device(1, 1, 1, v), "efficiency of a device"),
    ],
)
def test_values_must_be_positive_numbers(make, what, bad):
    error = ValueError if any(bad is v for v in NOT_POSITIVE) else TypeError
    with pytest.raises(error, match=f"(?i){what}.* must be"):
        make(bad)


@pytest.mark.parametrize("bad", [-1e-9, math.nan, math.inf, True, "0", None], ids=repr)
@pytest.mark.parametrize(
    "make, what", [(lambda v: Link(1, v), "latency"), (lambda v: Device(1, 1, 1, launch_overhead=v), "launch overhead")]
)
def test_latency_and_overhead_may_be_zero_but_not_less(make, what, bad):
    make(0)
    with pytest.raises((ValueError, TypeError), match=f"{what} .*0 or more"):
        make(bad)


def test_efficiency_above_one_and_names_that_are_no_text():
    assert Device(1, 1, 1, 1).efficiency == 1.0
    with pytest.raises(ValueError, match="efficiency .*1.5.* at most 1"):
        Device(1, 1, 1, 1.5)
    for make in (lambda: Link(1, 0, None), lambda: Link(1, 0, 3), lambda: Device(1, 1, 1, name=None)):
        with pytest.raises(TypeError, match="must be text"):
            make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Cluster("H100"), lambda: Cluster(None), lambda: Cluster(NVLINK4), lambda: Cluster(H100, intra_node=H100),
        lambda: Cluster(H100, inter_node=None), lambda: Cluster(H100, nodes=1.0), lambda: Cluster(H100, nodes=True),
        lambda: Cluster(H100, nodes=None), lambda: Cluster(H100, devices_per_node="8"),
    ],
)  # fmt: skip
def test_clusters_of_wrong_parts(make):
    with pytest.raises(TypeError, match="Device|Link|whole number"):
        make()


@pytest.mark.parametrize("bad", [0, -1, 10**7, 10**100])
def test_clusters_of_impossible_sizes(bad):
    for make in (lambda: Cluster(H100, nodes=bad), lambda: Cluster(H100, devices_per_node=bad)):
        with pytest.raises(ValueError, match="number of (nodes|devices per node) is .*from 1 to 1,000,000"):
            make()


@pytest.mark.parametrize(
    "bandwidth, text", [(450e9, "450 GB/s"), (1.25e9, "1.25 GB/s"), (31.5e9, "31.5 GB/s"), (2e6, "2 MB/s"), (999, "999 B/s"),
                        (5e12, "5,000 GB/s")]
)  # fmt: skip
def test_rates_in_words(bandwidth, text):
    assert rate(bandwidth) == text
    assert Link(bandwidth, 0, "x").title == f"x ({text})"


def test_a_link_that_takes_no_time_is_shown_by_its_name_alone():
    assert Link(1e18, 0, "no time").title == Link(1e30, 0, "no time").title == "no time"
    assert Link(1e18, 0).title == "a link (1,000,000,000 GB/s)"
