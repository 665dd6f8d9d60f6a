"""Who is in the cluster: engines, their groups and leaders, storage servers. Built once from the ClusterSpec."""

from __future__ import annotations

from dataclasses import dataclass, field

from testbed.fabric.spec import ClusterSpec, NodeKind
from testbed.ids import leader_role, node_of


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """A group of engines, all PE or all DE; every engine of a node is in the same group (paper 8.1)."""

    name: str
    kind: NodeKind
    engines: tuple[str, ...]
    nodes: tuple[str, ...] = field(init=False, compare=False)
    """Nodes that the group spans."""

    def __post_init__(self) -> None:
        """Looked up for every request and block, so it is found out once."""
        object.__setattr__(self, "nodes", tuple(dict.fromkeys(node_of(e) for e in self.engines)))

    @property
    def leader(self) -> str:
        """Role of the leader engine (rank 0)."""
        return leader_role(self.engines[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """The roles of a cluster."""

    groups: tuple[GroupPlan, ...]
    storage: tuple[str, ...]
    _group_of: dict[str, GroupPlan] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Looked up for every request and block, so it is found out once."""
        object.__setattr__(self, "_group_of", {node: group for group in self.groups for node in group.nodes})

    @property
    def nodes(self) -> tuple[str, ...]:
        """All nodes."""
        return tuple(n for group in self.groups for n in group.nodes)

    def engines(self, kind: NodeKind) -> tuple[str, ...]:
        """All engines of a kind, in order."""
        return tuple(e for group in self.groups if group.kind is kind for e in group.engines)

    def group_of_node(self, node: str) -> GroupPlan:
        """The group of a node's engines."""
        return self._group_of[node]

    def leader_of(self, engine: str) -> str:
        """Leader role of an engine's group."""
        return self.group_of_node(node_of(engine)).leader


def plan_cluster(spec: ClusterSpec) -> ClusterPlan:
    """One group of all prefill nodes, one of each decode node.

    The number of groups is UNKNOWN; Figure 5 shows one PE group over two nodes. DE groups of one node keep the first
    level of DE selection (paper 8.3) in play.
    """
    groups: list[GroupPlan] = []
    for kind in (NodeKind.PE, NodeKind.DE):
        nodes = [node for node in spec.nodes if node.kind is kind]
        per_group = len(nodes) if kind is NodeKind.PE else 1
        for at in range(0, len(nodes), per_group):
            members = nodes[at : at + per_group]
            engines = tuple(node.gpu(i) for node in members for i in range(node.gpus))
            groups.append(GroupPlan(name=f"{kind.value}-group{at // per_group}", kind=kind, engines=engines))
    return ClusterPlan(groups=tuple(groups), storage=spec.storage_names)
