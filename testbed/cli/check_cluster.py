"""Small clusters for `testbed check`: built-in ones by name, or a TOML file with the same keys."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from emulators.cluster import RoleDescription, describe_roles, params_for
from testbed.errors import ConfigError
from testbed.fabric.check.checkers.queues import Limits
from testbed.fabric.check.content import Cell, expected_tokens, right_cells
from testbed.fabric.check.role import GrantNames, Setup, Shared
from testbed.fabric.spec import ClusterSpec
from testbed.protocol.layout import U32, BlockLayout
from testbed.protocol.params import SYSTEMS, ProtocolParams, system_named
from testbed.protocol.placement import replicas_of
from testbed.protocol.plan import plan_cluster
from testbed.protocol.trie import ROOT
from testbed.units import MBIT

Turns = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckConfig:
    """What is explored. ``agents``: per agent its turns as (tokens appended, tokens to generate).

    ``stored_blocks``: leading blocks that all agents share and that are in storage from the start.
    """

    name: str = "custom"
    prefill_nodes: int = 1
    decode_nodes: int = 1
    gpus_per_node: int = 1
    storage_servers: int = 1
    replicas: int = 1
    system: str = "dualpath"
    layers: int = 2
    block_tokens: int = 2
    stored_blocks: int = 1
    agents: tuple[Turns, ...] = (((3, 2),), ((4, 1),))
    dram_pages: int = 16
    dram_cache_pages: int = 0
    stage_pages: int = 8
    de_hbm_pages: int = 16
    pe_hbm_blocks: int = 64
    storage_pages: int = 8
    window_blocks: int = 8
    quota_tokens: int = 64
    late_reports: bool = False


BUILT_IN = {
    config.name: config
    for config in (
        CheckConfig(name="1p1d-2r"),
        CheckConfig(name="1p1d-1r", agents=(((3, 2),),)),
        CheckConfig(name="1p1d-1r-1l", agents=(((3, 2),),), layers=1),
        CheckConfig(name="1p1d-1r-1l-cold", agents=(((2, 1),),), layers=1, stored_blocks=0),
        CheckConfig(name="1p1d-2turns", agents=(((3, 2), (1, 1)),)),
        CheckConfig(name="1p1d-1r-split", system="dualpath-split", stored_blocks=2, layers=1, agents=(((5, 2),),)),
        CheckConfig(
            name="1p1d-2r-split", system="dualpath-split", stored_blocks=2, layers=1, agents=(((5, 1),), ((5, 2),))
        ),
        CheckConfig(
            name="1p1d-2r-tight", dram_pages=3, stage_pages=1, de_hbm_pages=3, pe_hbm_blocks=16, window_blocks=1
        ),
        CheckConfig(
            name="1p1d-2turns-cache",
            layers=1,
            stored_blocks=2,
            agents=(((5, 1), (1, 1)),),
            dram_pages=4,
            dram_cache_pages=1,
        ),
        CheckConfig(name="1p1d-2r-late-reports", layers=1, late_reports=True),
        CheckConfig(name="1p2d-2r", decode_nodes=2),
        CheckConfig(name="2p1d-2r", prefill_nodes=2),
        CheckConfig(
            name="2p2d-6r",
            prefill_nodes=2,
            decode_nodes=2,
            storage_servers=3,
            replicas=2,
            layers=3,
            agents=(((5, 3), (2, 2)), ((3, 2), (1, 4)), ((4, 1), (3, 2))),
            dram_pages=9,
            stage_pages=1,
            de_hbm_pages=9,
            pe_hbm_blocks=120,
            window_blocks=2,
            quota_tokens=3,
            late_reports=True,
        ),
    )
}

_MAY_BE_0 = ("stored_blocks", "dram_cache_pages")


class CheckCost:
    """GPU time of the check world: none matters, but the quota counts tokens."""

    def attention_layer_time_ns(self, batch: Sequence[tuple[int, int]]) -> int:
        """One unit per new token."""
        return sum(new for _, new in batch)

    def prefill_layer_time_ns(self, batch: Sequence[tuple[int, int]], layers: int = 1) -> int:
        """There is no time."""
        return 0

    def decode_step_time_ns(self, context_tokens: Sequence[int]) -> int:
        """There is no time."""
        return 0


class CheckScript:
    """An agent: all begin with the shared tokens, and go on with their own."""

    def __init__(self, number: int, turns: Turns, shared: int) -> None:
        self.name = f"a{number}"
        self._turns = turns
        ids = [1 + k if k < shared else 1000 * (number + 1) + k for k in range(sum(n for n, _ in turns))]
        cuts = np.cumsum([0, *(n for n, _ in turns)])
        self._ids = [np.array(ids[a:b], dtype=np.uint32) for a, b in itertools.pairwise(cuts)]

    @property
    def turns(self) -> int:
        """Number of rounds."""
        return len(self._turns)

    def generate_tokens(self, turn: int) -> int:
        """Tokens to emit in a round."""
        return self._turns[turn][1]

    def append_ids(self, turn: int) -> U32:
        """Tokens appended in a round."""
        return self._ids[turn]


def load_config(name: str) -> CheckConfig:
    """A built-in configuration by name, or the path of a TOML file.

    Raises:
        ConfigError: neither, an unknown key, or a value of another type.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"{name} is neither a configuration ({', '.join(BUILT_IN)}) nor a file.")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: {error}.") from error
    return config_of(name, {"name": path.stem} | values)


def config_of(source: str, values: dict[str, Any]) -> CheckConfig:
    """The configuration with these keys; ``source`` is named in errors.

    Raises:
        ConfigError: an unknown key, a value of another type or out of range.
    """
    known = [f.name for f in fields(CheckConfig)]
    for key in values:
        if key not in known:
            raise ConfigError(f"{source}: unknown key {key}; the keys are {', '.join(known)}.")
    try:
        config = msgspec.convert(values, CheckConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {error}.") from error
    for key in known:
        value = getattr(config, key)
        if isinstance(value, int) and not isinstance(value, bool) and value < (key not in _MAY_BE_0):
            raise ConfigError(f"{source}: {key} is {value}, but it must be positive.")
    if not config.agents or any(not turns or min(min(turn) for turn in turns) < 1 for turns in config.agents):
        raise ConfigError(f"{source}: every agent needs turns, each of at least one token to append and to generate.")
    if any(turns[0][0] < config.stored_blocks * config.block_tokens for turns in config.agents):
        raise ConfigError(f"{source}: an agent's first turn is shorter than the {config.stored_blocks} stored blocks.")
    return config


def setup_of(config: CheckConfig, *, alter: Callable[[list[RoleDescription]], list[RoleDescription]] = list) -> Setup:
    """The cluster of a configuration; ``alter`` may replace descriptions of roles.

    Raises:
        ConfigError: a cluster or parameters that cannot be.
    """
    system = system_named(config.system)
    if not system.moves_kv:
        known = ", ".join(name for name, known_system in SYSTEMS.items() if known_system.moves_kv)
        raise ConfigError(f"check: system {config.system} moves no KV; choose one of {known}.")
    layout = BlockLayout(model="check", layers=config.layers, block_tokens=config.block_tokens, bytes_per_token_layer=1)
    params = params_for(system, _params(config, layout))
    plan = plan_cluster(_spec(config))
    scripts = [
        CheckScript(k, turns, config.stored_blocks * config.block_tokens) for k, turns in enumerate(config.agents)
    ]
    cost = CheckCost()
    stored = _stored(config, layout)
    parents = list(zip(stored, [ROOT, *stored][:-1], strict=True))
    descriptions = alter(
        describe_roles(plan, system, params, cost, scripts, [0] * len(scripts), central_host="ctl0", stored=parents)
    )
    servers = plan.storage

    def holders(key: int) -> tuple[str, ...]:
        return replicas_of(key, servers, params.replicas)

    blocks = sum(layout.blocks(a) + layout.blocks(g) for turns in config.agents for a, g in turns)
    shared = Shared(
        layout=layout,
        owner_of={endpoint: d.name for d in descriptions for endpoint in d.endpoints},
        names=GrantNames(),
        expected=_expected(layout, scripts),
        limits=Limits(
            windows={"reading": params.read_window_blocks, "_active": params.persist_window_blocks},
            rest=max(16, 4 * blocks * config.layers),
            channel=max(16, 4 * blocks * config.layers),
        ),
    )
    return Setup(
        descriptions=tuple(descriptions),
        shared=shared,
        constants=(params, system, plan, *plan.groups, cost, scripts, *scripts),
        replicas=holders,
        stored={server: {key: c for key, c in stored.items() if server in holders(key)} for server in servers},
        late_reports=config.late_reports,
        roomy=_is_roomy(config, params),
        caching=config.dram_cache_pages > 0,
    )


def _is_roomy(config: CheckConfig, params: ProtocolParams) -> bool:
    """Does everything that all agents could ever hold at once fit everywhere?"""
    bt = config.block_tokens
    most = sum(
        -(-max(sum(a + g for a, g in turns[: k + 1]) for k in range(len(turns))) // bt) for turns in config.agents
    )
    windows = (params.storage_pages, params.read_window_blocks, params.persist_window_blocks, params.stage_pages)
    forwards = 2 * 2 * min(params.layers_in_flight, len(params.steps)) * most
    pools = params.dram_pages >= most and params.de_hbm_pages >= most and params.pe_hbm_pages >= forwards
    return pools and min(windows) >= most and not config.dram_cache_pages


def _spec(config: CheckConfig) -> ClusterSpec:
    return ClusterSpec(
        name=config.name,
        prefill_nodes=config.prefill_nodes,
        decode_nodes=config.decode_nodes,
        gpus_per_node=config.gpus_per_node,
        storage_servers=config.storage_servers,
        cnic_rate_bps=MBIT,
        snic_rate_bps=MBIT,
        pcie_rate_bps=MBIT,
        dram_rate_bps=MBIT,
    )


def _params(config: CheckConfig, layout: BlockLayout) -> ProtocolParams:
    return ProtocolParams(
        layout=layout,
        replicas=config.replicas,
        dram_pages=config.dram_pages,
        dram_cache_pages=config.dram_cache_pages,
        stage_pages=config.stage_pages,
        de_hbm_pages=config.de_hbm_pages,
        pe_hbm_bytes=config.pe_hbm_blocks * layout.layer_block_bytes,
        compute_quota_ns=config.quota_tokens * config.layers,
        storage_pages=config.storage_pages,
        read_window_blocks=config.window_blocks,
        split_least_blocks=1,
        persist_window_blocks=config.window_blocks,
    )


def _stored(config: CheckConfig, layout: BlockLayout) -> dict[int, tuple[Cell, ...]]:
    tokens = np.arange(1, 1 + config.stored_blocks * config.block_tokens, dtype="<u4")
    return {
        key: right_cells(layout, tokens.tobytes(), block, len(tokens), range(layout.layers))
        for block, key in enumerate(layout.keys(tokens))
    }


def _expected(layout: BlockLayout, scripts: Sequence[CheckScript]) -> dict[str, tuple[int, ...]]:
    expected: dict[str, tuple[int, ...]] = {}
    for number, script in enumerate(scripts):
        context = b""
        for turn in range(script.turns):
            context += script.append_ids(turn).astype("<u4").tobytes()
            tokens = expected_tokens(layout, context, script.generate_tokens(turn))
            expected[f"{number}.{turn}"] = tokens
            context += np.array(tokens, dtype="<u4").tobytes()
    return expected
