"""Simulate a whole trace in a process of its own, and print what it took as JSON::

    python -m benchmarks.studies.simulation_cost conversation_trace.jsonl --replicas 64 --router kv

It is ``scheduler-components simulate trace`` without a report page, with the peak of its memory. Linux and macOS.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from benchmarks.measure import count_argument
from scheduler_components.errors import ComponentError
from scheduler_engine.cli.simulate_trace_command import ROUTERS
from scheduler_engine.simulation import (
    Simulation,
    SimulationConfig,
    check_trace,
    open_trace,
)

_ROOT = Path(__file__).parents[2]
_STATUS = Path("/proc/self/status")


class SimulationCost(msgspec.Struct, frozen=True):
    """What a run took, and what it found.

    Attributes:
        wall_s, cpu_s: of the process, without its start.
        peak_bytes: of its resident memory.
        num_finished: requests.
        simulated_s, hit_rate, ttft_p50_s: from the report.
    """

    wall_s: float
    cpu_s: float
    peak_bytes: int
    num_finished: int
    simulated_s: float
    hit_rate: float
    ttft_p50_s: float


def measure_simulation(trace: Path, *, num_replicas: int, router: str) -> SimulationCost:
    """Simulate all requests of a trace in a new process."""
    command = [sys.executable, "-m", "benchmarks.studies.simulation_cost", str(trace)]
    options = ["--replicas", str(num_replicas), "--router", router]
    done = subprocess.run([*command, *options], stdout=subprocess.PIPE, cwd=_ROOT, check=True)
    return msgspec.json.decode(done.stdout, type=SimulationCost)


def main() -> int:
    """Simulate a trace; return 2 for invalid arguments."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--replicas", type=count_argument, default=64)
    parser.add_argument("--requests", type=count_argument)
    parser.add_argument("--router", choices=sorted(ROUTERS), default="least-loaded")
    options = parser.parse_args()
    try:
        _simulate(options)
    except ComponentError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _simulate(options: argparse.Namespace) -> None:
    config = SimulationConfig(num_replicas=options.replicas)
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    check_trace(options.trace, limit=options.requests)
    simulation = Simulation(
        config=config,
        router=ROUTERS[options.router](config),
        arrivals=open_trace(options.trace, limit=options.requests),
    )
    for _ in simulation.run():
        pass
    report = simulation.report()
    cost = SimulationCost(
        wall_s=time.perf_counter() - wall_s,
        cpu_s=time.process_time() - cpu_s,
        peak_bytes=_peak_bytes(),
        num_finished=report.num_finished,
        simulated_s=report.duration_s,
        hit_rate=report.hit_rate["device"],
        ttft_p50_s=report.ttft_s.p50,
    )
    sys.stdout.write(msgspec.json.encode(cost).decode() + "\n")


def _peak_bytes() -> int:
    """Return the peak of this process's resident memory. On Linux ``ru_maxrss`` includes the parent's."""
    if not _STATUS.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak_kib = next(line.split()[1] for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(peak_kib) * 1024


if __name__ == "__main__":
    sys.exit(main())
