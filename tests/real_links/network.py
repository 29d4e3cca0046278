"""Four hosts on one machine, joined by links that the Linux kernel shapes: network namespaces, veth pairs, a bridge, tc.

Needs Linux, root, and iproute2. Each host's outgoing traffic is shaped to the rate asked for. Small packets
(acknowledgements) go first: with one plain queue they would wait behind data, and a ring would run at half the rate.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys

HEADERS = 1514 / 1448  # bytes on the wire per byte of data: Ethernet, IP and TCP headers of a full packet


def missing() -> str:
    """Why such a network cannot be made here; "" if it can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces exist on Linux only"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    tools = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    if tools:
        return f"{' and '.join(tools)} of the package iproute2 is not installed"
    probe = subprocess.run(["ip", "netns", "add", f"lessons-probe-{os.getpid()}"], capture_output=True, text=True)
    if probe.returncode:
        return f"this system refuses network namespaces ({probe.stderr.strip()})"
    subprocess.run(["ip", "netns", "del", f"lessons-probe-{os.getpid()}"], check=False)
    return ""


@contextlib.contextmanager
def hosts(count: int, bytes_per_second: float):
    """Names of `count` namespaces, each with an interface "link0" in one Ethernet, shaped to this rate on the way out."""
    names = [f"lessons-{os.getpid()}-{n}" for n in range(count)]
    hub = f"lessons-{os.getpid()}-hub"
    try:
        _do(f"ip netns add {hub}")
        _do(f"ip -n {hub} link add bridge0 type bridge")
        _do(f"ip -n {hub} link set bridge0 up")
        for n, name in enumerate(names):
            _do(f"ip netns add {name}")
            _do(f"ip -n {name} link add link0 type veth peer name port{n} netns {hub}")
            _do(f"ip -n {hub} link set port{n} master bridge0 up")
            _do(f"ip -n {name} addr add 10.77.0.{n + 1}/24 dev link0")
            _do(f"ip -n {name} link set lo up")
            _do(f"ip -n {name} link set link0 up")
            _set(name, "tcp_slow_start_after_idle", "0")
            # Megabytes of buffer would take a whole message and let send return long before the link has carried it
            _set(name, "tcp_wmem", "4096 131072 131072")
            _shape(name, bytes_per_second)
        yield names
    finally:
        for name in (*names, hub):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _shape(name: str, bytes_per_second: float) -> None:
    rate = int(bytes_per_second * 8)
    tc = f"tc -n {name}"
    _do(f"{tc} qdisc add dev link0 root handle 1: htb default 20 r2q 1000")
    _do(f"{tc} class add dev link0 parent 1: classid 1:1 htb rate {rate}bit ceil {rate}bit")
    _do(f"{tc} class add dev link0 parent 1:1 classid 1:10 htb rate {rate // 10}bit ceil {rate}bit prio 0")
    _do(f"{tc} class add dev link0 parent 1:1 classid 1:20 htb rate {rate - rate // 10}bit ceil {rate}bit prio 1")
    small = "match u16 0x0000 0xff80 at 2"  # an IP packet of fewer than 128 bytes
    _do(f"{tc} filter add dev link0 parent 1: protocol ip prio 1 u32 {small} flowid 1:10")


def _set(name: str, setting: str, value: str) -> None:
    _do(f"ip netns exec {name} sh -c 'echo {value} > /proc/sys/net/ipv4/{setting}'")


def _do(command: str) -> None:
    done = subprocess.run(shlex.split(command), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"`{command}` failed: {done.stderr.strip() or done.stdout.strip()}")
