"""The bottleneck-free analysis (paper section 4.2, equations 1-9): which resource limits a P:D ratio.

P prefill and D decode nodes with g GPUs each; every GPU has a CNIC of bandwidth B, every node an SNIC of s*B and DRAM
of M (half duplex). All SNICs read at full rate and every node's reads are spread evenly over its GPUs and its partners.
Only hits count: what is computed, written back or exchanged by the model is left out. A copy inside a node through its
CNIC (loopback) reads the CNIC once and writes it once.

A prefill engine and a decode engine then exchange T_p = B s / (D g^2) of hits read by the prefill node and
T_c = B s / (P g^2) of hits read by the decode node. The ``*_use`` functions give the demand on a resource over what it
can carry; above 1 it cannot be met and storage falls below its full rate.

Invariants: every answer is an exact fraction. At an end of ``pd_interval`` the use of each resource that sets the end
is exactly 1, and no use of a resource that depends on P/D is above 1 inside. Equation 1 is used with its correct
conclusion s <= g/2 (the paper draws s <= g from it).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType

from testbed.errors import ConfigError

ONE = Fraction(1)


class Resource(enum.Enum):
    """What the equations look at, per node or per GPU; named by who owns it and which way bytes go."""

    SNIC = "SNIC"
    PE_CNIC_READ = "PE CNIC read"
    PE_CNIC_WRITE = "PE CNIC write"
    DE_CNIC_READ = "DE CNIC read"
    DE_CNIC_WRITE = "DE CNIC write"
    PE_DRAM = "PE DRAM"
    DE_DRAM = "DE DRAM"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A node of the cluster: ``gpus`` (g), ``s``, and ``memory_ratio`` = M / (B s), DRAM over storage bandwidth."""

    gpus: int
    s: Fraction
    memory_ratio: Fraction

    def __post_init__(self) -> None:
        """Refuse a node without parts.

        Raises:
            ConfigError: g below 1, s outside (0, g], or no memory bandwidth.
        """
        if self.gpus < 1:
            raise ConfigError(f"g is {self.gpus}, but a node has at least 1 GPU.")
        if not 0 < self.s <= self.gpus:
            raise ConfigError(
                f"s is {self.s}, but it must be above 0 and at most g = {self.gpus}: an SNIC faster than all CNICs of "
                "its node together could not be emptied."
            )
        if self.memory_ratio <= 0:
            raise ConfigError("the memory bandwidth M must be positive.")

    @property
    def share(self) -> Fraction:
        """s/g: the storage bandwidth of a node over that of its CNICs."""
        return self.s / self.gpus


def setting(*, gpus: int, s: Fraction, cnic_bytes_per_s: Fraction, memory_bytes_per_s: Fraction) -> Setting:
    """A node from bandwidths in bytes per second.

    Raises:
        ConfigError: what ``Setting`` refuses, or a bandwidth that is not positive.
    """
    if cnic_bytes_per_s <= 0 or memory_bytes_per_s <= 0:
        raise ConfigError("the CNIC bandwidth B and the memory bandwidth M must be positive.")
    storage = cnic_bytes_per_s * s if s > 0 else ONE
    return Setting(gpus=gpus, s=s, memory_ratio=memory_bytes_per_s / storage)


def pd_ratio(prefill_nodes: int, decode_nodes: int) -> Fraction:
    """P/D.

    Raises:
        ConfigError: a count below 1.
    """
    if prefill_nodes < 1 or decode_nodes < 1:
        raise ConfigError(f"{prefill_nodes}P{decode_nodes}D: P and D must be at least 1.")
    return Fraction(prefill_nodes, decode_nodes)


# --- uses: demand over capacity at full storage rate ---------------------------------------------------------------


def pe_cnic_read_use(at: Setting, pd: Fraction) -> Fraction:
    """Equation 1: steps 3 and 5 of the PE path, 2 T_p D g over B = 2 s/g, whatever P/D."""
    return 2 * at.share


def pe_cnic_write_use(at: Setting, pd: Fraction) -> Fraction:
    """Equations 2-3: step 4 of the PE path and 5 of the DE path, (T_p + T_c) D g over B = (s/g)(1 + D/P)."""
    return at.share * (1 + 1 / pd)


def de_cnic_read_use(at: Setting, pd: Fraction) -> Fraction:
    """Equations 4-5: step 8 of the PE path, 3 and 6 of the DE path, (T_p + 2 T_c) P g over B = (s/g)(P/D + 2)."""
    return at.share * (pd + 2)


def de_cnic_write_use(at: Setting, pd: Fraction) -> Fraction:
    """Equations 6-7: steps 7 and 9 of the PE path, 7 of the DE path, (2 T_p + T_c) P g over B = (s/g)(2 P/D + 1)."""
    return at.share * (2 * pd + 1)


def pe_dram_use(at: Setting, pd: Fraction) -> Fraction:
    """Section 4.2, unnumbered: storage writes and the CNIC reads each byte once, 2 s B over M, whatever P/D."""
    return 2 / at.memory_ratio


def de_dram_use(at: Setting, pd: Fraction) -> Fraction:
    """Equation 8: own reads written once and read twice, forwarded ones once each, (3 + 2 P/D) s B over M."""
    return (3 + 2 * pd) / at.memory_ratio


USES: Mapping[Resource, Callable[[Setting, Fraction], Fraction]] = MappingProxyType(
    {
        Resource.SNIC: lambda at, pd: ONE,  # the assumption of the analysis
        Resource.PE_CNIC_READ: pe_cnic_read_use,
        Resource.PE_CNIC_WRITE: pe_cnic_write_use,
        Resource.DE_CNIC_READ: de_cnic_read_use,
        Resource.DE_CNIC_WRITE: de_cnic_write_use,
        Resource.PE_DRAM: pe_dram_use,
        Resource.DE_DRAM: de_dram_use,
    }
)


def uses(at: Setting, pd: Fraction) -> dict[Resource, Fraction]:
    """Demand over capacity of every resource while all SNICs read at full rate."""
    return {resource: use(at, pd) for resource, use in USES.items()}


def binding(at: Setting, pd: Fraction) -> tuple[Resource, ...]:
    """The resources that are used most: the SNICs while storage is the limit; several if they tie."""
    values = uses(at, pd)
    most = max(values.values())
    return tuple(resource for resource, value in values.items() if value == most)


def storage_share(at: Setting, pd: Fraction) -> Fraction:
    """Share of the storage bandwidth that is left when every flow slows down with the busiest resource, at most 1.

    A lower bound: a system that moves reads to the other side may do better.
    """
    return 1 / max(uses(at, pd).values())


# --- bounds on P/D -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PdInterval:
    """P/D for which storage is the limit: ``lower`` <= P/D <= min of ``uppers``, if ``always`` holds.

    ``uppers``: the bound of each resource; may be negative. ``lower`` is None if no P/D is large enough.
    ``always``: the resources whose use does not depend on P/D and whether they stay within 1.
    """

    lower: Fraction | None
    uppers: Mapping[Resource, Fraction]
    always: Mapping[Resource, bool]

    @property
    def upper(self) -> Fraction:
        """The smallest upper bound."""
        return min(self.uppers.values())

    @property
    def upper_resources(self) -> tuple[Resource, ...]:
        """What binds first as P/D grows; several if they tie."""
        return tuple(resource for resource, bound in self.uppers.items() if bound == self.upper)

    @property
    def lower_resource(self) -> Resource:
        """What binds first as P/D shrinks."""
        return Resource.PE_CNIC_WRITE

    @property
    def empty(self) -> bool:
        """Whether no P/D leaves storage as the limit."""
        return self.lower is None or self.lower > self.upper or not all(self.always.values())

    def __contains__(self, pd: Fraction) -> bool:
        return not self.empty and self.lower is not None and self.lower <= pd <= self.upper


def lower_bound(at: Setting) -> Fraction | None:
    """Equation 3: P/D >= s/(g - s), set by PE CNIC write; None at s = g, where no P/D is large enough."""
    return at.s / (at.gpus - at.s) if at.s < at.gpus else None


def de_cnic_read_bound(at: Setting) -> Fraction:
    """Equation 5: P/D <= (g - 2s)/s."""
    return (at.gpus - 2 * at.s) / at.s


def de_cnic_write_bound(at: Setting) -> Fraction:
    """Equation 7: P/D <= (g - s)/(2s)."""
    return (at.gpus - at.s) / (2 * at.s)


def de_dram_bound(at: Setting) -> Fraction:
    """Equation 8: P/D <= (M/(B s) - 3)/2."""
    return (at.memory_ratio - 3) / 2


def pd_interval(at: Setting) -> PdInterval:
    """Equation 9 with s <= g/2: s/(g-s) <= P/D <= min{(g-2s)/s, (g-s)/(2s), (M/(Bs)-3)/2}.

    With enough memory bandwidth it is empty beyond s/g = (3 - sqrt 5)/2 = 0.382. DE CNIC write is the tighter of the
    two CNIC bounds up to s/g = 1/3, DE CNIC read beyond.
    """
    return PdInterval(
        lower=lower_bound(at),
        uppers={
            Resource.DE_CNIC_READ: de_cnic_read_bound(at),
            Resource.DE_CNIC_WRITE: de_cnic_write_bound(at),
            Resource.DE_DRAM: de_dram_bound(at),
        },
        always={
            Resource.PE_CNIC_READ: pe_cnic_read_use(at, ONE) <= 1,
            Resource.PE_DRAM: pe_dram_use(at, ONE) <= 1,
        },
    )


def speedup_bound(prefill_nodes: int, decode_nodes: int) -> Fraction:
    """Section 1: with all SNICs reading instead of those of prefill nodes, JCT falls by at most (P + D)/P."""
    return 1 + 1 / pd_ratio(prefill_nodes, decode_nodes)
