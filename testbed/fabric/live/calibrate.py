"""Measures every shaped link with real TCP streams before the workload runs.

What is compared. A link of rate R carries ``R * 1448 / 1514`` of TCP payload: at MTU 1500 a full segment has 1448 bytes
of payload in 1514 bytes that htb charges (14 Ethernet, 20 IPv4, 32 TCP with timestamps; no preamble, no FCS).
Acknowledgements are outside the rate. Payload is counted at the receivers in steady state; the start (slow start,
filling of buffers and buckets) is skipped, see ``streams.FlowResult``.

How a link is isolated. A stream passes several shaped links, so one stream alone would measure the slowest of them and
could not tell a link that is too fast. Each link is therefore saturated by streams that share no other bottleneck: a
CNIC's read side by two streams to different CNICs, its write side by two from different CNICs, a PCIe link by the
copy engine, DRAM by the copy engines of several GPUs at once. A link that no set of streams can saturate (DRAM faster
than everything behind it, or than the host can carry) is read back from the kernel instead, and says so in ``method``.

Links are measured in batches that neither ask more of the host than ``most_bps`` nor load any link twice.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from testbed.fabric.live.addresses import Plan, ShapedPort
from testbed.fabric.live.network import Network
from testbed.fabric.live.readback import verify_shaping
from testbed.fabric.live.streams import Flow, run_streams

PAYLOAD_SHARE = 1448 / 1514
"""TCP payload in a full frame as htb counts it."""

DEFAULT_TOLERANCE = 0.02
DEFAULT_MOST_BPS = 1_000_000_000
DEFAULT_MOST_S = 15.0

_ROUNDS = (1, 2, 4)  # divisors of most_bps
_MOST_LOAD = 0.85  # of a link that is passed but not measured
_LEAST_S, _MOST_S = 0.2, 2.0
_MEASURED_BITS = 10_000_000  # about 150 super-packets, which a shared link delivers evenly
_MANY_WINDOWS = 60  # socket buffers hold a window per stream that may be counted too late or too early
_WARM_UP_S = 0.12
_LEAST_WINDOW_BYTES, _MOST_WINDOW_BYTES = 1 << 15, 200_000
_WINDOW_S = 0.020  # a stream survives this long without the processor


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMeasurement:
    """One link: ``rate_bps`` on the wire as specified, TCP payload ``expected_bps`` and ``measured_bps``.

    ``method`` is "measured", or "readback" where no streams can saturate the link and the kernel's settings were
    compared with the spec instead: ``measured_bps`` is then None, and ``error`` 0 if they agree, else -1.
    """

    name: str
    rate_bps: int
    expected_bps: float
    measured_bps: float | None
    error: float
    tolerance: float
    method: str

    @property
    def ok(self) -> bool:
        """Whether the link is within its tolerance."""
        return abs(self.error) <= self.tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """Streams that saturate ``port`` and nothing else; ``load_bps`` per resource passed."""

    port: ShapedPort
    flows: tuple[tuple[str, str], ...]
    load_bps: dict[str, float]

    @property
    def work_bps(self) -> float:
        """What the task asks of the host."""
        return self.port.rate_bps


def calibrate(
    network: Network,
    *,
    tolerance: float = DEFAULT_TOLERANCE,
    most_bps: float = DEFAULT_MOST_BPS,
    most_s: float = DEFAULT_MOST_S,
) -> list[LinkMeasurement]:
    """Measure every shaped link; what is off its tolerance is measured again, with less and less beside it.

    A link that is shaped wrongly stays off however often it is measured; a link that the host had no time for does not.
    ``most_bps`` bounds the sum of the rates measured at the same time: about 1 Gbit/s is what two cores carry. After
    ``most_s`` nothing is measured again.

    Raises:
        HostError: streams cannot connect, or stand still.
    """
    plan = network.plan
    tasks: list[_Task] = []
    unreachable: list[ShapedPort] = []
    for port in plan.ports.values():
        task = _task(plan, port)
        if task is None or port.rate_bps > most_bps:
            unreachable.append(port)
        else:
            tasks.append(task)
    found: dict[str, LinkMeasurement] = {}
    give_up_s = time.monotonic() + most_s
    due = tasks
    for divisor in _ROUNDS:
        for batch in _batches(plan, due, most_bps / divisor):
            if divisor > 1 and time.monotonic() > give_up_s:
                break
            for name, measured in _measure(network, batch).items():
                found[name] = _judge(plan.ports[name], measured, tolerance)
        due = [task for task in due if not found[task.port.name].ok]
    if unreachable:
        problems = verify_shaping(network)
        for port in unreachable:
            found[port.name] = _read_back(port, problems, tolerance)
    return [found[name] for name in plan.ports]


def _judge(port: ShapedPort, measured_bps: float, tolerance: float) -> LinkMeasurement:
    expected = port.rate_bps * PAYLOAD_SHARE
    return LinkMeasurement(
        name=port.name, rate_bps=port.rate_bps, expected_bps=expected, measured_bps=measured_bps,
        error=measured_bps / expected - 1, tolerance=tolerance, method="measured",
    )  # fmt: skip


def _read_back(port: ShapedPort, problems: Sequence[str], tolerance: float) -> LinkMeasurement:
    expected = port.rate_bps * PAYLOAD_SHARE
    device = f"{port.host}:{port.device} "
    wrong = any(problem.startswith((f"{port.name} ", device)) for problem in problems)
    return LinkMeasurement(
        name=port.name, rate_bps=port.rate_bps, expected_bps=expected, measured_bps=None,
        error=-1.0 if wrong else 0.0, tolerance=tolerance, method="readback",
    )  # fmt: skip


def _task(plan: Plan, port: ShapedPort) -> _Task | None:
    """The first set of streams that saturates ``port`` without loading another link above _MOST_LOAD."""
    for flows in _candidates(plan, port.name):
        load: dict[str, float] = defaultdict(float)
        share = port.rate_bps / len(flows)
        for source, destination in flows:
            for step in plan.path(source, destination):
                load[step] += share
        bounded = all(
            load_bps <= _MOST_LOAD * plan.ports[step].rate_bps
            for step, load_bps in load.items()
            if step in plan.ports and step != port.name
        )
        if bounded and load[port.name] >= 0.999 * port.rate_bps:
            return _Task(port=port, flows=tuple(flows), load_bps=dict(load))
    return None


def _candidates(plan: Plan, name: str) -> Iterator[list[tuple[str, str]]]:
    """Sets of (source, destination) that might saturate a link, cheapest first."""
    owner, _, rest = name.partition(".")
    what, _, way = rest.partition(".")
    if what == "snic":
        is_server = owner in plan.spec.storage_names
        others = [n.name for n in plan.nodes] if is_server else list(plan.spec.storage_names)
        index = [*plan.spec.storage_names, *(n.name for n in plan.nodes)].index(owner)
        others = others[index % len(others) :] + others[: index % len(others)]
        for count in range(1, len(others) + 1):
            pairs = [(f"{owner}.snic", f"{other}.snic") for other in others[:count]]
            yield pairs if way == "tx" else [(b, a) for a, b in pairs]
    elif what == "pcie":
        node, _, i = owner.partition("gpu")
        pair = (f"{node}.copy{i}", f"{owner}.copy")
        yield [pair if way == "rx" else pair[::-1]]
    elif what == "dram":
        gpus = next(n.gpus for n in plan.nodes if n.name == owner)
        pairs = [(f"{owner}.copy{i}", f"{owner}gpu{i}.copy") for i in range(gpus)]
        for count in range(2, gpus + 1):
            yield pairs[:count]
        yield pairs + [pair[::-1] for pair in pairs]
    else:
        yield _through_cnic(plan, owner, int(what.removeprefix("cnic")), way)


def _through_cnic(plan: Plan, node: str, i: int, way: str) -> list[tuple[str, str]]:
    """A loopback through the CNIC, and a stream to (from) the DRAM (HBM) behind the next CNIC of the cluster."""
    cnics = [(n.name, k) for n in plan.nodes for k in range(n.gpus)]
    other, k = cnics[(cnics.index((node, i)) + 1) % len(cnics)]
    loopback = (f"{node}.cnic{i}", f"{node}gpu{i}.cnic")
    if way == "read":
        return [loopback, (f"{node}gpu{i}.cnic", f"{other}.cnic{k}")]
    return [loopback, (f"{other}gpu{k}.cnic", f"{node}.cnic{i}")]


def _batches(plan: Plan, tasks: Sequence[_Task], most_bps: float) -> Iterator[list[_Task]]:
    """First fit: a task joins the first batch in which no link would be loaded above its measure."""
    batches: list[tuple[list[_Task], dict[str, float], list[float]]] = []
    for task in sorted(tasks, key=lambda t: (t.port.name.rsplit(".", 1)[-1], t.port.rate_bps)):
        for members, load, work in batches:
            if work[0] + task.work_bps <= most_bps and _fits(plan, task, members, load):
                break
        else:
            members, load, work = [], defaultdict(float), [0.0]
            batches.append((members, load, work))
        members.append(task)
        work[0] += task.work_bps
        for step, load_bps in task.load_bps.items():
            load[step] += load_bps
    return iter([members for members, _, _ in batches])


def _fits(plan: Plan, task: _Task, members: Sequence[_Task], load: dict[str, float]) -> bool:
    measured = {member.port.name for member in members}
    for step, load_bps in task.load_bps.items():
        if step in measured or (step == task.port.name and load.get(step)):
            return False
        if step == task.port.name or step not in plan.ports:
            continue
        if load.get(step, 0.0) + load_bps > _MOST_LOAD * plan.ports[step].rate_bps:
            return False
    return True


def _measure(network: Network, batch: Sequence[_Task]) -> dict[str, float]:
    """TCP payload in bits per second per measured link."""
    flows: list[Flow] = []
    seconds, warm_up = _LEAST_S, _WARM_UP_S
    for task in batch:
        rate = task.port.rate_bps / len(task.flows)
        window = int(min(max(rate / 8 * _WINDOW_S, _LEAST_WINDOW_BYTES), _MOST_WINDOW_BYTES))
        flows += (
            Flow(name=task.port.name, source=source, destination=destination, window_bytes=window)
            for source, destination in task.flows
        )
        held_bits = 8 * window * len(task.flows)
        enough_bits = max(_MEASURED_BITS, held_bits * _MANY_WINDOWS if len(task.flows) > 2 else 0)
        seconds = max(seconds, min(enough_bits / task.port.rate_bps, _MOST_S))
        warm_up = max(warm_up, min(2 * held_bits / task.port.rate_bps, _MOST_S))
    results = run_streams(network, flows, seconds=warm_up + seconds, warm_up_s=warm_up)
    return {task.port.name: results[task.port.name].steady_bps for task in batch}
