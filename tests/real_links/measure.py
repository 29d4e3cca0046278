"""Measures the programs on kernel-shaped links and holds them against the replay; stores what lesson 02 shows.

Run as root on Linux:  python tests/real_links/measure.py [--store]
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import network  # noqa: E402
import programs  # noqa: E402

from lessons_lib import Cluster, Link, replay, run  # noqa: E402
from lessons_lib.hardware import LAPTOP, Device  # noqa: E402

HOSTS = 4
RATE = 25e6  # bytes/s on the wire, each direction: slow enough that two cores drive four hosts
LATENCY = 1e-4  # of a small message between two such hosts; hundreds of times less than any message here takes
STORED = Path(__file__).parents[2] / "notebooks" / "measurements" / "real_links.json"


def measured_seconds(name: str, names: list[str], repeats: int) -> tuple[float, float | None, list]:
    """Medians over the repeats of the slowest host's time, under plain gloo: of the program, and of its computing alone (None
    where that is next to nothing); and what each host returned."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).with_name("worker.py"))]
        arguments = [str(HOSTS), str(Path(folder, "store")), name, str(repeats)]
        workers = [
            subprocess.Popen(["ip", "netns", "exec", host, *command, str(rank), *arguments], stdout=subprocess.PIPE, text=True)
            for rank, host in enumerate(names)
        ]
        try:
            outputs = [json.loads(worker.communicate(timeout=120)[0].splitlines()[-1]) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
    whole, alone = ([max(times) for times in zip(*(output[kind] for output in outputs))] for kind in ("seconds", "alone"))
    return statistics.median(whole), statistics.median(alone) if alone else None, [output["result"] for output in outputs]


def replayed_seconds(program, alone: float | None = None) -> tuple[float, list]:
    """The same program recorded, and replayed on the link that the kernel was told to be, without the packets' headers.

    `alone`: seconds that its computing takes here without messages; the device of the replay is then as fast.
    """
    recording = run(program, ranks=HOSTS)
    device = LAPTOP if alone is None else Device(recording.flops[0] / alone, 1e30, 1e30, 1.0)
    link = Link(RATE / network.HEADERS, LATENCY, "shaped by the kernel")
    return replay(recording, Cluster(device, nodes=HOSTS, devices_per_node=1, inter_node=link)).step_time, recording.results


def compare(names: list[str], program, repeats: int = 5) -> dict:
    wall, alone, returned = measured_seconds(program.__name__, names, repeats)
    virtual, recorded = replayed_seconds(program, alone)
    assert returned == recorded, f"{program.__name__} returned {returned} under plain gloo, {recorded} when recorded"
    return {"program": program.__name__, "measured": wall, "replayed": virtual, "ratio": wall / virtual}


def main() -> None:
    if reason := network.missing():
        sys.exit(f"Real links cannot be made here: {reason}.")
    rows = []
    with network.hosts(HOSTS, RATE) as names:
        for program in programs.PROGRAMS:
            rows.append(compare(names, program))
            print("{program:20s} measured {measured:.3f} s, replayed {replayed:.3f} s, ratio {ratio:.3f}".format(**rows[-1]))
    if "--store" in sys.argv:
        machine = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
        STORED.parent.mkdir(exist_ok=True)
        kept = {"date": date.today().isoformat(), "machine": machine, "hosts": HOSTS, "bytes_per_second": RATE,
                "headers": network.HEADERS, "latency": LATENCY, "bytes": 4 * programs.ELEMENTS, "rows": rows}  # fmt: skip
        STORED.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
