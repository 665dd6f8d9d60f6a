"""How fast the flow simulation is: requests per second on one core, with one layer group and with every layer.

Run: ``python -m tests.bench.bench_sim [--full]``. Targets of the quick run are ratios against a reference of the same
run: the same number of events pushed into and taken from the simulation's own heap, nothing done with them; and a
request of the largest cluster against one of the default cluster. ``--full`` runs the paper's sizes to their end, with
targets in seconds: 2,048 agents on 2P4D, and 48,000 on 48P96D. Every case has a process of its own, whose peak memory
is reported; times are CPU times of one thread, compilation not included.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from testbed.flowsim.compiled import compiled
from testbed.flowsim.heap import Heap, drop_first, make_heap, push
from testbed.flowsim.run import FlowCase, simulate

WAITING = 1_024
"""Events in the reference's heap at any time."""
MOST_HEAPS = {1: 16.0, 61: 26.0}
"""Time of a run over that of the bare heap with as many events, at most; by layer groups."""
MOST_GROWTH = 2.0
"""Time of a request of 48P96D over that of a request of 2P4D, at most: 24 times as many engines to choose from."""
FULL = {"2P4D, 2,048 agents": (60.0, 2.0), "48P96D, 48,000 agents": (900.0, 8.0)}
"""Seconds and GB, at most."""


def case_of(scale: int, agents: int, trace: str = "64K", *, horizon_s: float = 0.0, steps: int = 1) -> FlowCase:
    """660B, DualPath, ``scale`` times 2P4D."""
    return FlowCase(
        model="ds-660b",
        trace=trace,
        system="dualpath",
        prefill_nodes=2 * scale,
        decode_nodes=4 * scale,
        agents=agents,
        horizon_s=horizon_s,
        options=(("steps", float(steps)),),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a case took. ``heap_s``: the same number of events in the bare heap."""

    requests: int
    events: int
    seconds: float
    heap_s: float
    peak_gb: float


@compiled
def _turn_over(heap: Heap, events: int) -> int:
    """Take the first event and push one at a later time, again and again; the last time."""
    now = 0
    for k in range(events):
        now = heap.time_ns[0]
        drop_first(heap)
        push(heap, now + (k * 7_919) % 100_003, 0, 0, 0)
    return int(now)


def heap_seconds(events: int) -> float:
    """CPU time of ``events`` events in a heap that does nothing else."""
    heap = make_heap(WAITING + 1)
    for k in range(WAITING):
        push(heap, (k * 7_919) % 100_003, 0, 0, 0)
    _turn_over(heap, 1)
    began = time.process_time()
    _turn_over(heap, events)
    return time.process_time() - began


def measure(case: FlowCase) -> Cost:
    """Simulate a case once everything is compiled."""
    simulate(case_of(1, 4))
    began = time.process_time()
    result = simulate(case)
    seconds = time.process_time() - began
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    return Cost(
        requests=result.requests,
        events=result.events,
        seconds=seconds,
        heap_s=heap_seconds(result.events),
        peak_gb=peak_gb,
    )


def measured(name: str, case: FlowCase) -> Cost:
    """The cost of a case in a process of its own, printed."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        cost = pool.submit(measure, case).result()
    print(
        f"{name}: {cost.requests:,} requests, {cost.events:,} events in {cost.seconds:.1f} s; "
        f"{cost.requests / cost.seconds:,.0f} requests/s, {1e6 * cost.seconds / cost.requests:.1f} us a request, "
        f"{1e9 * cost.seconds / cost.events:.0f} ns an event; peak {cost.peak_gb:.2f} GB",
        flush=True,
    )
    return cost


def quick() -> bool:
    """The ratios; whether all targets were met."""
    good = True
    for steps, most in MOST_HEAPS.items():
        name = f"2P4D, 512 agents, {steps} layer group{'s' if steps > 1 else ''}"
        cost = measured(name, case_of(1, 512, steps=steps))
        ratio = cost.seconds / cost.heap_s
        print(f"{name}: {ratio:.1f} times the bare heap (target {most:.0f})", flush=True)
        good = good and ratio <= most
    # The trace is drawn once per case: the small one runs longer, so that this weighs little in both.
    small = measured("2P4D, 500 agents, 1,200 s", case_of(1, 500, "48K", horizon_s=1_200.0))
    large = measured("48P96D, 12,000 agents, 300 s", case_of(24, 12_000, "48K", horizon_s=300.0))
    growth = large.seconds / large.requests / (small.seconds / small.requests)
    print(f"48P96D: {growth:.1f} times the time of a request of 2P4D (target {MOST_GROWTH:.0f})", flush=True)
    return good and growth <= MOST_GROWTH


def full() -> bool:
    """The paper's sizes; whether all targets were met."""
    good = True
    for (name, (most_s, most_gb)), case in zip(
        FULL.items(), (case_of(1, 2_048), case_of(24, 48_000, "48K")), strict=True
    ):
        cost = measured(name, case)
        print(f"{name}: targets {most_s:.0f} s, {most_gb:.0f} GB", flush=True)
        good = good and cost.seconds <= most_s and cost.peak_gb <= most_gb
    return good


def main(*, paper_size: bool = False) -> int:
    """Exit code 1 when a target was missed."""
    return 0 if (full() if paper_size else quick()) else 1


if __name__ == "__main__":
    sys.exit(main(paper_size="--full" in sys.argv[1:]))
