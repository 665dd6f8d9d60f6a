"""The roles of a plan: what every world that runs one hosts."""

from __future__ import annotations

from collections.abc import Sequence

from emulators.cluster import RoleDescription, describe_roles
from testbed.fabric.spec import CONTROL_HOST
from testbed.protocol.params import SystemConfig
from testbed.runtime.plan import RunPlan


def roles_of(plan: RunPlan, system: SystemConfig, stored: Sequence[tuple[int, int]]) -> list[RoleDescription]:
    """Every role of one system; ``stored`` blocks, ``(key, parent)`` each, are in the index from the start."""
    return describe_roles(
        plan.roles,
        system,
        plan.params,
        plan.cost,
        plan.scripts,
        plan.starts_ns,
        central_host=CONTROL_HOST,
        stored=stored,
        tool_delay_ns=plan.tool_delay_ns,
    )
