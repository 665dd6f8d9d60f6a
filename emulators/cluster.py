"""All machines of a cluster, by role name: what every world needs to host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from emulators.agent_driver import AgentDriver, Script
from emulators.central_scheduler import CentralScheduler
from emulators.collectives import ExpertGroup
from emulators.decode_engine import DecodeEngine
from emulators.dram_buffer import DramBuffer
from emulators.group_leader import GroupLeader
from emulators.kv_index import KvIndex
from emulators.prefill_engine import PrefillEngine
from emulators.storage_server import StorageServer
from testbed.fabric.spec import NodeKind
from testbed.ids import (
    DRIVER,
    INDEX,
    SCHEDULER,
    cnic_dram_endpoint,
    cnic_hbm_endpoint,
    copy_dram_endpoint,
    copy_hbm_endpoint,
    node_of,
    snic_endpoint,
)
from testbed.protocol.batching import CostModel
from testbed.protocol.machine import Machine
from testbed.protocol.params import ProtocolParams, SystemConfig
from testbed.protocol.plan import ClusterPlan, GroupPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleDescription:
    """A role to host: how to make its machine, the memory it owns, and where that memory can be written.

    ``host`` names the place (node, GPU, storage server, central host). ``has_gpu`` and ``has_disk`` say which devices
    the world must give it. ``exchanges_with`` are the engines that it has collectives with (none: no sockets for them).
    """

    name: str
    host: str
    make: Callable[[], Machine]
    memory_bytes: int = 0
    endpoints: tuple[str, ...] = ()
    has_gpu: bool = False
    has_disk: bool = False
    exchanges_with: tuple[str, ...] = ()


def params_for(system: SystemConfig, params: ProtocolParams) -> ProtocolParams:
    """A system without layerwise prefill has one step that holds all layers, and loads it before it computes."""
    if system.layerwise:
        return params
    return replace(params, layer_group=params.layout.layers, layers_in_flight=1)


def describe_roles(
    plan: ClusterPlan,
    system: SystemConfig,
    params: ProtocolParams,
    cost: CostModel,
    scripts: Sequence[Script],
    starts_ns: Sequence[int],
    *,
    central_host: str,
    stored: Sequence[tuple[int, int]] = (),
    tool_delay_ns: int = 0,
) -> list[RoleDescription]:
    """Every role of the cluster, storage first, driver last; ``stored`` blocks are in the index from the start."""
    params = params_for(system, params)
    page = params.layout.full_block_bytes
    roles: list[RoleDescription] = []
    for server in plan.storage:
        roles.append(
            RoleDescription(
                name=server,
                host=server,
                make=lambda server=server: StorageServer(server, params),  # type: ignore[misc]
                memory_bytes=2 * params.storage_pages * page,
                endpoints=(snic_endpoint(server),),
                has_disk=True,
            )
        )
    roles.append(RoleDescription(name=INDEX, host=central_host, make=lambda: KvIndex(stored)))
    roles.append(
        RoleDescription(name=SCHEDULER, host=central_host, make=lambda: CentralScheduler(plan, system, params))
    )
    for group in plan.groups:
        for node in group.nodes:
            roles.append(_dram(node, plan, system, params))
        for engine in group.engines:
            roles.append(_engine(engine, group, system, params, cost))
        roles.append(
            RoleDescription(
                name=group.leader,
                host=group.engines[0],
                make=lambda group=group: GroupLeader(group, params),  # type: ignore[misc]
            )
        )
    driver = RoleDescription(
        name=DRIVER, host=central_host, make=lambda: AgentDriver(scripts, starts_ns, params, tool_delay_ns)
    )
    roles.append(driver)
    return roles


def _dram(node: str, plan: ClusterPlan, system: SystemConfig, params: ProtocolParams) -> RoleDescription:
    engines = [e for e in plan.group_of_node(node).engines if node_of(e) == node]
    direct = [copy_dram_endpoint(e) for e in engines] if system.direct_copies else []
    pages = params.dram_pages + params.dram_cache_pages + params.stage_pages
    return RoleDescription(
        name=node,
        host=node,
        make=lambda: DramBuffer(node, plan, params, direct_copies=system.direct_copies),
        memory_bytes=pages * params.layout.full_block_bytes,
        endpoints=(snic_endpoint(node), *(cnic_dram_endpoint(e) for e in engines), *direct),
    )


def _engine(
    engine: str, group: GroupPlan, system: SystemConfig, params: ProtocolParams, cost: CostModel
) -> RoleDescription:
    machine, memory_bytes = (
        (PrefillEngine, params.pe_hbm_pages * params.pe_page_bytes)
        if group.kind is NodeKind.PE
        else (DecodeEngine, params.de_hbm_pages * params.layout.full_block_bytes)
    )
    direct = (copy_hbm_endpoint(engine),) if system.direct_copies else ()
    return RoleDescription(
        name=engine,
        host=engine,
        make=lambda: machine(engine, group.leader, system, params, cost, _expert_group(engine, group, params)),
        memory_bytes=memory_bytes,
        endpoints=(cnic_hbm_endpoint(engine), *direct),
        has_gpu=True,
        exchanges_with=tuple(e for e in group.engines if e != engine) if params.collectives else (),
    )


def _expert_group(engine: str, group: GroupPlan, params: ProtocolParams) -> ExpertGroup | None:
    """An engine's part in the collectives of its group: a forward's in layer steps, a decode step's over all layers."""
    collectives = params.collectives
    if collectives is None:
        return None
    prefill = group.kind is NodeKind.PE
    return ExpertGroup(
        engine,
        group.engines,
        collectives,
        collectives.parts(params.steps if prefill else ((0, params.layout.layers),)),
        params.wait_deadline_ns // 2,  # a request's own deadline must not come first
        per_token_ns=collectives.prefill_expert_ns if prefill else 0.0,
        per_round_ns=0.0 if prefill else collectives.decode_expert_ns,
    )
