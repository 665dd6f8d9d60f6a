"""``make bench``: every benchmark, one after the other; exit code 1 if a target was missed.

Targets are ratios against a reference of the same run wherever there is one: machines are shared and noisy. Arguments
choose benchmarks by name (``python -m tests.bench dataplane shaped``).
"""

from __future__ import annotations

import sys

from testbed.errors import TestbedError
from tests.bench import (
    bench_cluster,
    bench_dataplane,
    bench_isolation,
    bench_lanes,
    bench_network,
    bench_ratio,
    bench_shaped,
    bench_sim,
)

BENCHMARKS = {
    "dataplane": bench_dataplane.main,
    "shaped": bench_shaped.main,
    "network": bench_network.main,
    "lanes": bench_lanes.main,
    "isolation": bench_isolation.main,
    "cluster": bench_cluster.main,
    "ratio": bench_ratio.main,
    "sim": bench_sim.main,
}


def main(names: list[str]) -> int:
    """Run the named benchmarks, all without names."""
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"unknown benchmark {unknown[0]!r}; choose from {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    missed = []
    for name in names or BENCHMARKS:
        print(f"== {name}", flush=True)
        try:
            if BENCHMARKS[name]():
                missed.append(name)
        except TestbedError as error:
            print(error, file=sys.stderr)
            missed.append(name)
    print(f"missed: {', '.join(missed)}" if missed else "all targets met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
