"""Topologies: what ships, what a shape refuses, what the live world refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from testbed.errors import ConfigError
from testbed.fabric.live.addresses import Plan
from testbed.fabric.live.limits import check_buildable
from testbed.models.model import DS_27B
from testbed.models.scale import FittedScale, Scale
from testbed.units import GBIT
from topologies.loader import ClusterShape, cluster_spec, load_topology, topology_names

SHAPE = ClusterShape(name="x", prefill_nodes=1, decode_nodes=2)


def scale(bandwidth: float = 8000, gpus: int = 1) -> FittedScale:
    return Scale(bandwidth_scale=bandwidth, time_scale=1.0, length_scale=8, agents_scale=32, gpus_scale=gpus).fit(
        DS_27B
    )


@pytest.mark.parametrize(
    ("name", "p", "d"), [("1p1d", 1, 1), ("1p2d", 1, 2), ("2p1d", 2, 1), ("2p4d", 2, 4), ("48p96d", 48, 96)]
)
def test_shipped_topologies_are_the_papers(name: str, p: int, d: int) -> None:
    shape = load_topology(name)
    assert (shape.prefill_nodes, shape.decode_nodes, shape.gpus_per_node, shape.s) == (p, d, 8, 1.0)
    assert name in topology_names() and shape.title


def test_rates_are_the_papers_over_the_scale() -> None:
    spec = cluster_spec(replace(SHAPE, s=0.5), scale(8000))
    assert (spec.cnic_rate_bps, spec.snic_rate_bps) == (400 * GBIT // 8000, 200 * GBIT // 8000)
    assert (spec.pcie_rate_bps, spec.dram_rate_bps) == (512 * GBIT // 8000, 4000 * GBIT // 8000)
    assert [n.name for n in spec.nodes] == ["pe0", "de0", "de1"] and spec.gpus_per_node == 8


def test_the_storage_cluster_is_a_share_of_all_snics() -> None:
    spec = cluster_spec(replace(SHAPE, storage_share=0.5, storage_servers=4), scale(8000))
    assert spec.storage_rate_bps * 4 == spec.snic_rate_bps * 3 // 2
    assert cluster_spec(SHAPE, scale(8000)).storage_rate_bps == 0
    with pytest.raises(ConfigError, match="storage_share is -1, but it must be positive"):
        replace(SHAPE, storage_share=-1)


def test_folded_gpus_keep_the_bandwidth_of_their_node() -> None:
    spec = cluster_spec(SHAPE, scale(8000, gpus=4))
    assert spec.gpus_per_node == 2 and spec.cnic_rate_bps == 4 * spec.snic_rate_bps


def test_an_unknown_topology_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown topology '1p2dd' \(did you mean '1p2d'\?\)"):
        load_topology("1p2dd")
    with pytest.raises(ConfigError, match=r"choose one of 1p1d, 1p2d"):
        load_topology("zebra")


def test_a_file_of_ones_own_is_read_strictly(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("prefill_nodes = 3\ndecode_nodes = 1\n")
    assert load_topology(str(path)) == ClusterShape(name="mine", prefill_nodes=3, decode_nodes=1)
    for text, sentence in (
        ("prefil_nodes = 3\ndecode_nodes = 1", r"unknown key 'prefil_nodes' \(did you mean 'prefill_nodes'\?\)"),
        ("prefill_nodes = '3'\ndecode_nodes = 1", r"prefill_nodes is '3', but it must be a whole number"),
        ("prefill_nodes = 3", r"decode_nodes is missing; give it a whole number"),
        ("prefill_nodes = ", r"is not TOML"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=sentence):
            load_topology(str(path))
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read \(No such file"):
        load_topology(str(tmp_path / "none.toml"))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"prefill_nodes": 0}, r"prefill_nodes \(P\) is 0, but it must be between 1"),
        ({"decode_nodes": -1}, r"decode_nodes \(D\) is -1"),
        ({"gpus_per_node": 0}, r"gpus_per_node \(g\) is 0"),
        ({"storage_servers": 0}, r"storage_servers is 0"),
        ({"s": 0.0}, r"s is 0, but it must be above 0 and at most g = 8"),
        ({"s": 8.5}, r"s is 8.5, but .* faster than all CNICs"),
    ],
)
def test_no_world_has_such_a_cluster(change: dict[str, int], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        replace(SHAPE, **change)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"prefill_nodes": 48}, r"prefill_nodes \(P\) is 48, but the live world builds at most 16.* --world sim"),
        ({"decode_nodes": 96}, r"decode_nodes \(D\) is 96"),
        ({"gpus_per_node": 17}, r"gpus_per_node \(g\) is 17, but the live world builds at most 16"),
        ({"storage_servers": 17}, r"storage_servers is 17"),
    ],
)
def test_the_live_world_says_what_it_cannot_build(change: dict[str, int], sentence: str) -> None:
    spec = cluster_spec(replace(SHAPE, **change), scale(8000))
    with pytest.raises(ConfigError, match=sentence):
        check_buildable(spec)
    with pytest.raises(ConfigError, match=sentence):
        Plan(spec)


def test_a_link_below_what_can_be_shaped_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"slowest link has 0.5 Mbit/s, below the 1 Mbit/s .* lower scale.bandwidth"):
        cluster_spec(replace(SHAPE, s=0.01), scale(8000))
