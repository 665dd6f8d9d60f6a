"""Scenarios: what ships resolves; overrides are typed; units are mapped; what cannot run is refused in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from scenarios.loader import LoadedScenario, load_scenario, name_of, read_scenario, scenario_names
from scenarios.resolve import systems_of
from testbed.errors import ConfigError
from testbed.fabric.arbiter import PAPER_TABLES
from testbed.fabric.spec import LaneDiscipline
from testbed.metrics.expression import check_expression, systems_named
from testbed.models.compute import HOPPER
from testbed.models.hardware import alpha_tokens, kv_dram_bytes_per_node
from testbed.models.model import DS_27B

RUN_DIR = Path("nowhere")
PINNED = (
    "scale.bandwidth=8000", "scale.time=1.524", "scale.length=16", "scale.agents=32", "workload.agents=48",
    "workload.start_turn=3", "workload.max_turns=8", "protocol.block_tokens=512", "gpu.speedup=8",
)  # fmt: skip
"""Figures of quickstart that tests count on, whatever it is tuned to."""
SHIPPED = {
    "quickstart", "one-pe-two-de", "two-pe-one-de", "two-pe-four-de", "swe-agent", "ablation", "cnic-bound",
    "compute-bound", "collectives", "two-pe-four-de-collectives",
}  # fmt: skip
TRAJECTORY = """{"history": [{"role": "user", "content": "fix the bug please"},
 {"role": "assistant", "content": "let me look at it"}, {"role": "user", "content": "a file"},
 {"role": "assistant", "content": "it is fixed now"}]}"""


def load(
    *overrides: str, name: str = "quickstart", systems: Sequence[str] = (), seed: int | None = None
) -> LoadedScenario:
    pinned = PINNED if name == "quickstart" else ()
    return load_scenario(name, overrides=(*pinned, *overrides), systems=systems, seed=seed, run_dir=RUN_DIR)


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_every_shipped_scenario_resolves(name: str) -> None:
    loaded = load(name=name)
    plan = loaded.plan
    assert len(plan.scripts) == len(plan.starts_ns) > 0
    assert loaded.scenario.title and loaded.scenario.description
    assert plan.run_dir == RUN_DIR and plan.scenario == name
    for expectation in loaded.expectations:
        check_expression(expectation.metric)
        assert systems_named(expectation.metric) <= {s.name.replace("-", "_") for s in plan.systems}
    assert name in scenario_names()


def test_the_issues_scenarios_ship() -> None:
    assert set(scenario_names()) == SHIPPED
    assert [s.name for s in load().plan.systems] == ["basic", "dualpath"]
    five = ["basic", "layerwise", "dual-path-rr", "dualpath", "oracle"]
    assert [s.name for s in load(name="ablation").plan.systems] == five
    spec = load().plan.cluster
    assert (spec.prefill_nodes, spec.decode_nodes, spec.gpus_per_node, spec.s) == (1, 1, 8, 1)


def test_paper_units_become_emulated_ones() -> None:
    plan = load("protocol.fetch_interval_s=0.05", "protocol.compute_quota_s=0.2").plan
    scale, params = plan.scale, plan.params
    assert params.fetch_interval_ns == scale.emulated_duration_ns(0.05)
    assert params.compute_quota_ns == scale.emulated_duration_ns(0.2)
    assert params.alpha_tokens == scale.emulated_load_tokens(alpha_tokens(DS_27B))
    assert params.layout.block_tokens == 512 // 16
    room = float(kv_dram_bytes_per_node(DS_27B) / scale.byte_scale) / params.layout.full_block_bytes
    assert params.dram_pages == int(room)
    assert params.wait_deadline_ns == 60 * 10**9
    slow = load("scale.time=8", "scale.bandwidth=22000").plan
    assert slow.params.wait_deadline_ns == slow.scale.emulated_duration_ns(22) > 170 * 10**9
    assert load("protocol.wait_deadline_s=10").plan.params.wait_deadline_ns == scale.emulated_duration_ns(10)
    assert load("protocol.beta_tokens=256000").plan.params.beta_tokens == 500
    assert load("protocol.alpha_tokens=512000").plan.params.alpha_tokens == 1000
    assert load("protocol.kv_dram_bytes=40000000000").plan.params.dram_pages == int(room / 2)
    assert params.dram_cache_pages == 0
    assert load("protocol.dram_cache_bytes=40000000000").plan.params.dram_cache_pages == int(room / 2)


def test_overrides_are_typed_by_the_schema() -> None:
    scenario = read_scenario(
        "quickstart", ["scale.bandwidth=8000", "systems=basic, oracle", "protocol.quota_scope=layer"]
    )
    assert scenario.scale.bandwidth == 8000.0 and scenario.systems == ("basic", "oracle")
    assert scenario.protocol.quota_scope == "layer"
    assert load("seed=4").plan.seed == 4 and load("seed=4", seed=0).plan.seed == 0
    assert load("seed=4", seed=7, systems=["oracle"]).plan.seed == 7
    assert [s.name for s in load(systems=["oracle"]).plan.systems] == ["oracle"]
    assert load("cluster.s=0.5").plan.cluster.s == 0.5


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("scale.bandwith=1", r"unknown key 'scale.bandwith' \(did you mean 'scale.bandwidth'\?\)"),
        ("scal.bandwidth=1", r"unknown key 'scal' \(did you mean 'scale'\?\)"),
        ("scale.bandwidth=fast", r"scale.bandwidth is 'fast', but it must be a number"),
        ("workload.agents=1.5", r"workload.agents is '1.5', but it must be a whole number"),
        ("protocol.quota_scope=step", r"it must be one of forward, layer"),
        ("scale=3", r"'scale' is a table; set one of scale.bandwidth"),
        ("seed.x=3", r"seed is a value, so there is no key 'seed.x'"),
        ("seed", r"give it as key=value"),
        ("model=ds-27", r"unknown model 'ds-27' \(did you mean 'ds-27b'\?\)"),
        ("systems=dualpath-copy-enigne", r"unknown system .* \(did you mean 'dualpath-copy-engine'\?\)"),
        ("systems=dualpath-copy-engine-copy-engine", "option copy-engine is given twice"),
        ("systems=oracle-copy-engine", "oracle moves no KV"),
        ("systems=dualpth", r"unknown system 'dualpth' \(did you mean 'dualpath'\?\)"),
        ("systems=basic,basic", r"each can run once"),
        ("systems=", r"no systems to run"),
        ("topology=1p3d", r"unknown topology '1p3d' \(did you mean"),
        ("cluster.s=9", r"s is 9, but it must be above 0 and at most g = 8"),
        ("cluster.gpus_per_node=0", r"gpus_per_node \(g\) is 0"),
        ("cluster.decode_nodes=0", r"decode_nodes \(D\) is 0"),
        ("protocol.layer_group=31", r"protocol.layer_group is 31; the model has 30 layers"),
        ("protocol.fetch_interval_s=0", r"protocol.fetch_interval_s is 0, but it must be positive"),
        ("protocol.dram_cache_bytes=1000", r"dram_cache_bytes is 1000, which is no whole block of \d+ bytes; raise it"),
        ("protocol.block_tokens=100", r"length_scale 16 does not divide a block of 100 tokens"),
        ("protocol.max_decode_batch=0", r"protocol.max_decode_batch is 0, but it must be at least 1"),
        ("protocol.queue_limit=0", r"protocol.queue_limit is 0, but it must be at least 1"),
        ("protocol.z_factor=-1", r"protocol.z_factor is -1, but it must be a positive number"),
        ("workload.arrivals=1e-300", r"arrive over more than a year; raise workload.arrivals"),
        ("scale.bandwidth=1e-9", r"scale.bandwidth is 1e-09, but it must be at least 0.001"),
        ("cluster.storage_share=nan", r"cluster.storage_share is nan, but it must be a finite number"),
        ("workload.agents=99999999999999999999", r"agents is 99999999999999999999, but it must be at most 100000"),
        ("trust.cpu_share=-1", r"trust.cpu_share is -1, but it must be positive"),
        ("cluster.high_share=0.99999", r"high_share is 0.99999, but it must be from 0.5 to 0.9999; lanes = prio"),
        ("gpu.speedup=0", r"gpu.speedup is 0, but it must be a positive number"),
        ("scale.time=0.0001", r"below the 4 B minimum"),
        ("workload.source=shiped", r"unknown source 'shiped'"),
        ("workload.source=sweagent", r"source sweagent needs workload.path"),
        ("workload.source=table2:1M", r"unknown trace profile '1M'"),
        ("workload.path=/no/such.traj", r"/no/such.traj: cannot be read \(No such file"),
    ],
)
def test_a_bad_override_is_one_sentence(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        load(override)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2


def test_an_override_of_what_is_no_table_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("scale = 5\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"--set scale.time=2: scale is no table in the file; write \[scale\] there."):
        load("scale.time=2", name=str(path))


@pytest.mark.parametrize(
    ("override", "systems", "memory"),
    [
        ("protocol.kv_dram_bytes=1000000000", "dualpath", "the DE buffer in a node's DRAM holds 3"),
        ("protocol.de_hbm_bytes=1000000000", "dualpath", "the HBM of a DE holds 3"),
        ("protocol.pe_hbm_bytes=1000000000", "basic", "the HBM of a PE without layerwise prefill holds 3"),
        ("protocol.pe_hbm_bytes=1000000000", "dualpath", "the HBM of a PE beside the layer steps in flight holds 1"),
    ],
)
def test_what_fits_no_memory_is_refused(override: str, systems: str, memory: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"\(agent\d+, turn \d+, \d+ emulated tokens\) takes .*{memory}; raise protocol"
    ):
        load(override, systems=[systems])


def test_scenario_names_and_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown scenario 'quickstrt' \(did you mean 'quickstart'\?\)"):
        load(name="quickstrt")
    mine = tmp_path / "mine.toml"
    mine.write_text(
        'title="t"\ndescription="d"\ntopology="1p1d"\nmodel="ds-27b"\nsystems=["basic"]\n'
        "[scale]\nbandwidth=8000\ntime=1.0\nlength=8\nagents=32\n[workload]\nagents=2\nmax_turns=2\n"
    )
    assert name_of(str(mine)) == "mine"
    assert len(load(name=str(mine)).plan.scripts) == 2
    mine.write_text(mine.read_text() + "[protocl]\n")
    with pytest.raises(ConfigError, match=r"mine.toml: unknown key 'protocl' \(did you mean 'protocol'\?\)"):
        load(name=str(mine))
    mine.write_text(mine.read_text().replace("[protocl]", "[[expect]]\nname='x'\nmetrc='y'"))
    with pytest.raises(ConfigError, match=r"unknown key 'expect\[0\].metrc' \(did you mean 'expect\[0\].metric'\?\)"):
        load(name=str(mine))


def test_a_folder_of_trajectories_gives_one_agent_each(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.traj").write_text(TRAJECTORY)
    loaded = load(f"workload.path={tmp_path}", name="swe-agent")
    assert len(loaded.plan.scripts) == 3 and "3 agents" in loaded.stands_for
    assert len(load(f"workload.path={tmp_path}", "workload.agents=5", name="swe-agent").plan.scripts) == 5
    (tmp_path / "b.traj").write_text("{")
    with pytest.raises(ConfigError, match=r"b.traj: is truncated JSON"):
        load(f"workload.path={tmp_path}", name="swe-agent")
    with pytest.raises(ConfigError, match="path is for source sweagent"):
        load(f"workload.path={tmp_path}", "workload.source=table2:64K")


def test_the_first_line_names_every_departure() -> None:
    line = load().stands_for
    assert "DS 27B on 1P1D" in line and "400 Gbit/s" in line and "50 Mbit/s" in line and "8x as fast" in line
    assert "\n" not in line
    line = load("gpu.speedup=1", "gpu.decode_base_s=0.5").stands_for
    assert "as fast" not in line and "gpu.decode_base_s set to 0.5" in line


def test_the_first_line_names_what_the_paper_does_not_have() -> None:
    departures = {
        "cluster.storage_share=0.5": "storage limited to 0.5 of all SNICs",
        "protocol.dram_cache_bytes=50000000000": "50 GB of DRAM cache per node",
        "protocol.write_back=free": "written back for nothing",
        "workload.tool_delay_s=2": "tool calls of 2 s",
    }
    plain, line = load().stands_for, load(*departures).stands_for
    for said in departures.values():
        assert said in line and said not in plain


def test_gpus_are_faster_in_every_respect() -> None:
    gpu, paper = load("gpu.speedup=4", "gpu.prefill_base_s=0.1").plan.cost.gpu, HOPPER["ds-27b"]
    assert gpu.effective_flops == 4 * paper.effective_flops
    assert gpu.effective_attention_flops == 4 * paper.effective_attention_flops
    assert gpu.decode_base_s == paper.decode_base_s / 4 and gpu.decode_per_sequence_s == paper.decode_per_sequence_s / 4
    assert gpu.prefill_base_s == 0.1


def test_online_arrivals_are_in_order() -> None:
    starts = load("workload.arrivals=40").plan.starts_ns
    assert list(starts) == sorted(starts) and starts[0] > 0


def test_the_resolved_configuration_is_plain_data() -> None:
    import json

    resolved = json.loads(json.dumps(load("seed=3").resolved))
    assert resolved["seed"] == 3 and resolved["scenario"] == "quickstart"
    assert resolved["emulated"]["cluster"]["snic_rate_bps"] == load().plan.cluster.snic_rate_bps
    assert resolved["emulated"]["params"]["dram_pages"] == load().plan.params.dram_pages


def test_options_stack_on_systems() -> None:
    plain, optioned = systems_of(["dualpath", "dual-path-rr-copy-engine"])
    assert (plain.copy_path, optioned.copy_path) == ("cnic", "copy-engine")
    assert optioned.name == "dual-path-rr-copy-engine" and optioned.title == "+ dual path, copy engine"
    assert optioned.side_policy == "round_robin"


def test_lanes_are_chosen_by_the_scenario_and_auto_is_htb_until_a_kernel_was_asked() -> None:
    assert load().plan.cluster.lanes is LaneDiscipline.HTB
    assert load("cluster.lanes=auto").plan.cluster.lanes is LaneDiscipline.HTB
    loaded = load("cluster.lanes=infiniband")
    assert loaded.plan.cluster.lanes is LaneDiscipline.INFINIBAND
    assert loaded.plan.cluster.arbiter == PAPER_TABLES
    assert "lanes infiniband;" in loaded.stands_for
    assert loaded.resolved["emulated"]["cluster"]["lanes"] == "infiniband"


def test_arbiter_tables_come_from_a_file_and_one_that_holds_none_is_named(tmp_path: Path) -> None:
    file = tmp_path / "opensm.conf"
    file.write_text("qos_high_limit 10\nqos_vlarb_high 0:64\nqos_vlarb_low 2:64\n")
    assert load("cluster.lanes=infiniband", f"cluster.opensm={file}").plan.cluster.arbiter.high_limit == 10
    file.write_text("qos_high_limit 10\nqos_vlarb_high 0-64\nqos_vlarb_low 2:64\n")
    with pytest.raises(ConfigError, match=r'opensm.conf: qos_vlarb_high: entry "0-64" is not VL:WEIGHT'):
        load(f"cluster.opensm={file}")
    with pytest.raises(ConfigError, match="nowhere: cannot be read"):
        load("cluster.opensm=nowhere")


@pytest.mark.parametrize(
    ("overrides", "needle"),
    [
        (("cluster.high_share=0.9", "cluster.kv_share=0.2"), r"add up to 1\.1, but"),
        (("cluster.high_share=1.2",), r"high_share is 1\.2: .* more than the link"),
        (("cluster.kv_share=-0.1",), r"kv_share is -0\.1: .* less than nothing"),
        (("cluster.ets_quanta=983040,0",), "a quantum of 0 would never be served"),
        (("cluster.ets_quanta=983040",), "ets_quanta"),
        (("cluster.lanes=hbt",), "one of auto, htb, prio, ets, none, infiniband"),
    ],
)
def test_lanes_that_no_link_can_keep_are_refused(overrides: tuple[str, ...], needle: str) -> None:
    with pytest.raises(ConfigError, match=needle):
        load(*overrides)
    kept = load("cluster.high_share=0.9", "cluster.kv_share=0.1", "cluster.ets_quanta=10000,100").plan.cluster
    assert (kept.high_share, kept.ets_quanta) == (0.9, (10_000, 100))
