"""``testbed doctor``: what the live world needs of a host, tried one by one, with the way out for whatever is missing.

Nothing is guessed from version numbers: a sandbox is made and thrown away, and inside it one of each device, queueing
discipline and filter is really created. A second later everything is gone again.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import resource
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from testbed.errors import HostError
from testbed.fabric.live import devices
from testbed.fabric.live.addresses import PortKind, ShapedPort
from testbed.fabric.live.blockstore import DIRECT, FADVISE, NO_DEVICE, probe
from testbed.fabric.live.lane_offers import MODULES, try_lanes
from testbed.fabric.live.lanes import PACKET_BYTES, port_messages, redirect_messages
from testbed.fabric.live.netlink import RTM_GETLINK, NetlinkSocket, attributes, encode_dump
from testbed.fabric.live.sandbox import run_in_sandbox

_LEAST_PYTHON = (3, 11)
_LEAST_CORES = 2
_LEAST_MEMORY_BYTES = 2 << 30
_LEAST_FILES = 1024

_LINK_ATTRIBUTES, _IFLA_GSO_MAX_SIZE = 32, 41
_BRIDGE, _PORT, _VETH, _MACVLAN, _IFB = 10, 11, 12, 13, 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing needed: whether it is there, what was found, and what to do if it is not.

    ``warning``: the testbed runs all the same, but would do better with the remedy.
    """

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    warning: bool = False


def checks(runs_directory: Path = Path("runs")) -> list[Check]:
    """Everything the live world needs, in the order in which one would mend it.

    ``runs_directory``: where run folders will be made; it need not be there yet.
    """
    found = [
        _python(),
        _virtual_environments(),
        _cores(),
        _memory(),
        _open_files(),
        _storage(runs_directory.resolve()),
    ]
    return found + _kernel()


def _python() -> Check:
    return Check(
        name="Python 3.11 or later",
        ok=sys.version_info >= _LEAST_PYTHON,
        detail=f"{platform.python_version()} at {sys.executable}",
        remedy="install Python 3.11 or later and make the virtual environment with it.",
    )


def _virtual_environments() -> Check:
    missing = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
    inside = sys.prefix != sys.base_prefix
    return Check(
        name="virtual environments",
        ok=inside or not missing,
        detail="this one is in use" if inside else f"missing: {', '.join(missing)}" if missing else "venv is there",
        remedy="install the venv module (Debian, Ubuntu: apt install python3-venv).",
    )


def _cores() -> Check:
    cores = len(os.sched_getaffinity(0))
    return Check(
        name="processor cores",
        ok=cores >= _LEAST_CORES,
        detail=f"{cores} usable",
        remedy=f"give the machine or container {_LEAST_CORES} cores; with fewer, scale the bandwidths down.",
    )


def _memory() -> Check:
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    return Check(
        name="memory",
        ok=available >= _LEAST_MEMORY_BYTES,
        detail=f"{available / (1 << 30):.1f} GiB available",
        remedy="free 2 GiB, or choose a smaller topology.",
    )


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard if hard != resource.RLIM_INFINITY else sys.maxsize
    return Check(
        name="open files",
        ok=most >= _LEAST_FILES,
        detail=f"limit {soft}, can be raised to {'any number' if most == sys.maxsize else most}",
        remedy=f"raise the hard limit to {_LEAST_FILES} or more (ulimit -Hn, /etc/security/limits.conf).",
    )


def _storage(directory: Path) -> Check:
    """Storage servers read past the page cache, or reads of a warm cache would be faster than any SSD."""
    while not directory.exists():  # runs make it
        directory = directory.parent
    name = "direct I/O (O_DIRECT) for runs"
    try:
        method = probe(directory)
    except (HostError, OSError) as error:
        return Check(
            name=name,
            ok=False,
            detail=f"{directory}: {error}",
            remedy="choose a directory you can write to with --out.",
        )
    details = {
        DIRECT: f"O_DIRECT works in {directory}",
        FADVISE: f"no O_DIRECT in {directory}: pages are dropped around every read instead, which costs more CPU",
        NO_DEVICE: f"{directory} lies in memory, or its device is hidden: that reads cost a disk's time is not checked",
    }
    return Check(
        name=name,
        ok=True,
        warning=method != DIRECT,
        detail=details[method],
        remedy="better: runs on a disk file system (ext4, xfs, btrfs), with --out.",
    )


def _kernel() -> list[Check]:
    """A throw-away sandbox, and in it one of everything."""
    with tempfile.TemporaryDirectory(prefix="testbed-doctor-") as folder:
        answer = Path(folder, "answer")

        def entry() -> int:
            answer.write_text(json.dumps(_try_features()))
            return 0

        problem = ""
        try:
            run_in_sandbox(entry)
        except HostError as error:
            problem = str(error)
        outcomes: dict[str, str] = json.loads(answer.read_text()) if answer.exists() else {}
    way = "as root" if os.geteuid() == 0 else "as an ordinary user, without root"
    found = [
        Check(
            name="namespaces (user, mount, pid, network)",
            ok=not problem,
            detail=problem or f"a sandbox was made {way}",
            remedy=problem,
        )
    ]
    for name, module, _ in _FEATURES:
        outcome = outcomes.get(name, "not tried: it needs a sandbox")
        found.append(
            Check(
                name=name,
                ok=not outcome,
                detail=outcome or "made and thrown away",
                remedy=f"load the kernel module {module} (as root: modprobe {module}); cloud images have it in the "
                f"package linux-modules-extra-{platform.release()} or in the distribution's full kernel.",
            )
        )
    return found + _lanes(outcomes)


def _lanes(outcomes: dict[str, str]) -> list[Check]:
    """Disciplines that a scenario may choose; only htb has to be there, and that is checked above."""
    found = []
    for lanes, modules in MODULES.items():
        outcome = outcomes.get(f"lanes {lanes.value}", "not tried: it needs a sandbox")
        found.append(
            Check(
                name=f"lanes {lanes.value}",
                ok=True,
                warning=bool(outcome),
                detail=outcome or "made and read back",
                remedy=f"only cluster.lanes = {lanes.value} needs it: load {modules}, or use another discipline.",
            )
        )
    return found


def _try_features() -> dict[str, str]:
    """In the sandbox: try each in order; later ones use what earlier ones made. Empty: it worked."""
    outcomes: dict[str, str] = {}
    with NetlinkSocket.here("the sandbox") as socket:
        for name, _, attempt in _FEATURES:
            try:
                attempt(socket)
                outcomes[name] = ""
            except (HostError, OSError) as error:
                outcomes[name] = str(error)
        return outcomes | {f"lanes {lanes.value}": problem for lanes, problem in try_lanes(socket).items()}


def _shaped(kind: PortKind) -> ShapedPort:
    return ShapedPort(
        name="trial", host="the sandbox", device="trial", index=_VETH, rate_bps=100_000_000, kind=kind, sources=()
    )


def _try_bridge(socket: NetlinkSocket) -> None:
    socket.run([devices.bridge_message(_BRIDGE)])


def _try_veth(socket: NetlinkSocket) -> None:
    socket.run([devices.veth_message("port", _PORT, peer="nic", peer_index=_VETH)])


def _try_hairpin(socket: NetlinkSocket) -> None:
    socket.run([devices.veth_message("port2", 21, peer="nic2", peer_index=22, master=_BRIDGE)])
    socket.run([devices.bridge_port_message(21, hairpin=True)])


def _try_macvlan(socket: NetlinkSocket) -> None:
    socket.run([devices.macvlan_message("mem", _MACVLAN, lower=_VETH, mode="vepa", address="10.0.0.1")])


def _try_ifb(socket: NetlinkSocket) -> None:
    socket.run([devices.ifb_message("ifb", _IFB)])


def _try_htb(socket: NetlinkSocket) -> None:
    socket.run(port_messages(_shaped(PortKind.LANES), filters=False))


def _try_u32(socket: NetlinkSocket) -> None:
    socket.run(port_messages(_shaped(PortKind.LANES), classes=False))


def _try_clsact(socket: NetlinkSocket) -> None:
    socket.run(redirect_messages(_VETH, ingress_to=_IFB, egress_to=_IFB)[:1])


def _try_mirred(socket: NetlinkSocket) -> None:
    socket.run(redirect_messages(_VETH, ingress_to=_IFB, egress_to=_IFB)[1:])


def _try_packet_size(socket: NetlinkSocket) -> None:
    for link in socket.dump(encode_dump(RTM_GETLINK)):
        if devices.flags_of(link)[0] == _VETH:
            size = int.from_bytes(attributes(link, _LINK_ATTRIBUTES).get(_IFLA_GSO_MAX_SIZE, b""), sys.byteorder)
            if size != PACKET_BYTES:
                raise HostError(f"the kernel keeps super-packets of {size} bytes: it is older than 5.18.")


_FEATURES: tuple[tuple[str, str, Callable[[NetlinkSocket], None]], ...] = (
    ("bridge", "bridge", _try_bridge),
    ("veth", "veth", _try_veth),
    ("bridge port with hairpin and static forwarding", "bridge", _try_hairpin),
    ("macvlan in VEPA mode", "macvlan", _try_macvlan),
    ("ifb", "ifb", _try_ifb),
    ("htb with lanes", "sch_htb", _try_htb),
    ("u32 filters", "cls_u32", _try_u32),
    ("clsact", "sch_ingress", _try_clsact),
    ("mirred redirection", "act_mirred", _try_mirred),
    ("bounded super-packets (gso_max_size)", "veth", _try_packet_size),
)
