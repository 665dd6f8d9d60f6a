"""``testbed run --world sim``: the run folder of a live run, and the same one every time."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

import testbed.report
from tests.unit.test_cli import only_folder
from tests.unit.test_cli import testbed as cli

SMALL = (
    "run", "quickstart", "--world", "sim", "--set", "workload.agents=6", "--set", "workload.max_turns=3",
    "--set", "cluster.gpus_per_node=2",
)  # fmt: skip
RDMA = ("--set", "collectives.transport=rdma")
ENVIRONMENT = "environment.json"
"""What depends on where and when a run was made: the command with its folder, the host."""


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ENVIRONMENT)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_sim_run_leaves_what_a_live_run_leaves(tmp_path: Path) -> None:
    done = cli(*SMALL, "--out", str(tmp_path))
    assert done.code == 0, done.err
    assert done.out.startswith("Stands for DS 27B") and "Run valid: virtual time, links as specified" in done.out
    assert "DualPath" in done.err  # its progress
    folder = only_folder(tmp_path)
    document = json.loads((folder / "metrics.json").read_text())
    schema = Path(testbed.report.__file__).parent / "schema" / "metrics.schema.json"
    jsonschema.validate(document, json.loads(schema.read_text()))
    assert (document["world"], document["valid"], document["links"]) == ("sim", True, [])
    assert json.loads((folder / "config.resolved.json").read_text())["world"] == "sim"
    requests = list(csv.DictReader((folder / "requests.csv").open()))
    assert {row["system"] for row in requests} == {"basic", "dualpath"} and not any(row["error"] for row in requests)
    roles = {path.stem for path in (folder / "dualpath" / "trace").iterdir()}
    assert {"pe0", "de0gpu1", "st0", "leader-pe0", "scheduler", "index", "driver"} <= roles
    for path in (folder / "dualpath" / "trace").iterdir():
        times = [json.loads(line)["t"] for line in path.read_text().splitlines()]
        assert times == sorted(times)


def test_the_ledger_is_settled_to_the_byte(tmp_path: Path) -> None:
    assert cli(*SMALL, "--out", str(tmp_path), "--quiet").code == 0
    document = json.loads((only_folder(tmp_path) / "metrics.json").read_text())
    entries = {(e["system"], e["resource"]): e for e in document["ledger"]}
    for system in ("basic", "dualpath"):
        for resource in ("storage.snic.tx", "pe0.snic.rx", "pe0.cnic0.read", "de0.cnic1.write", "de0.dram"):
            entry = entries[system, resource]
            assert entry["measured_bytes"] == entry["expected_bytes"] > 0, entry


def simulate(out: Path, hash_seed: str, *more: str) -> dict[str, bytes]:
    code = "from testbed.cli.main import main; main()"
    command = [sys.executable, "-c", code, *SMALL, "--quiet", "--out", str(out), *more]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return contents(only_folder(out))


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    """Traces, requests, metrics: whatever the order in which this interpreter hashes."""
    first, second = (simulate(tmp_path / seed, seed) for seed in ("1", "2"))
    assert sum(name.endswith(".jsonl") for name in first) >= 20
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []
    other = simulate(tmp_path / "other", "1", "--seed", "11")
    assert other["requests.csv"] != first["requests.csv"]


def test_collectives_are_simulated_alike_and_settled_to_the_byte(tmp_path: Path) -> None:
    arguments = ("--set", "collectives.transport=rdma", "--systems", "dualpath", "--quiet")
    for folder in ("first", "second"):
        done = cli(*SMALL, *arguments, "--out", str(tmp_path / folder))
        assert done.code == 0, done.err
    first, second = (contents(only_folder(tmp_path / folder)) for folder in ("first", "second"))
    assert [name for name in first if first[name] != second[name]] == []
    document = json.loads(first["metrics.json"])
    schema = Path(testbed.report.__file__).parent / "schema" / "metrics.schema.json"
    jsonschema.validate(document, json.loads(schema.read_text()))
    seen = document["systems"]["dualpath"]["collectives"]
    assert all(seen[key][kind]["p50"] > 0 for key in ("dispatch_s", "combine_s") for kind in ("pe", "de"))
    entries = {e["resource"]: e for e in document["ledger"]}
    for resource in ("pe0.cnic0.read", "pe0.cnic1.write", "de0.cnic0.write", "de0.cnic1.read"):
        entry, high = entries[resource], entries[f"{resource} (high lane)"]
        assert entry["measured_bytes"] == entry["expected_bytes"] > 0, entry
        assert 0 < high["measured_bytes"] == pytest.approx(high["expected_bytes"], rel=1e-4), high


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--world", "simm"), "unknown world 'simm' (did you mean 'sim'?); choose live or sim."),
        (("--set", "topology=48p96d"), "the live world builds at most 16, for every GPU is a process of this host"),
        (("--set", "cluster.gpus_per_node=17"), "gpus_per_node (g) is 17, but the live world builds at most 16"),
        (("--world", "sim", "--set", "sim.disk_latency_s=-1"), "sim.disk_latency_s is -1, but it must be between"),
        (
            (*RDMA, "--set", "model=qwen-32b"),
            "Qwen 32B has no experts, so its engines exchange nothing; set collectives.",
        ),
        ((*RDMA, "--set", "cluster.gpus_per_node=1"), "group pe-group0 is pe0gpu0 alone, which has nobody to exchange"),
        (
            ("--set", "collectives.transport=rails"),
            'every group here is one node; set collectives.transport = "rdma" or',
        ),
        ((*RDMA, "--set", "collectives.layers=-1"), "collectives.layers is -1, but it must be at least 1."),
    ],
)
def test_a_world_that_cannot_run_it_says_why(arguments: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    done = cli("run", "quickstart", *arguments, "--out", str(tmp_path / "runs"))
    assert done.code == 2 and sentence in done.err and done.err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_a_cluster_too_large_for_one_host_runs_in_the_sim_world(tmp_path: Path) -> None:
    arguments = ("--set", "cluster.decode_nodes=20", "--systems", "dualpath", "--quiet")
    assert cli(*SMALL, *arguments, "--out", str(tmp_path)).code == 0


def test_a_failure_is_told_and_judged(tmp_path: Path) -> None:
    """A wait that is too short ends rounds by name; that is a failed run, in any world."""
    done = cli(*SMALL, "--set", "protocol.wait_deadline_s=0.01", "--out", str(tmp_path), "--quiet")
    assert done.code == 1 and "rounds ended with an error" in done.err and "TimedOut" in done.err
    assert "TimedOut" in (only_folder(tmp_path) / "failure.txt").read_text()


def test_free_write_back_moves_nothing_and_changes_no_hit(tmp_path: Path) -> None:
    found = {}
    for write_back in ("real", "free"):
        out = tmp_path / write_back
        assert cli(*SMALL, "--quiet", "--set", f"protocol.write_back={write_back}", "--out", str(out)).code == 0
        systems = json.loads((only_folder(out) / "metrics.json").read_text())["systems"]
        found[write_back] = {name: (m["hit_tokens"], m["storage_bytes"]["written"] > 0) for name, m in systems.items()}
        assert all(m["tokens_verified"] == m["tokens_emitted"] for m in systems.values())
    for name, (hits, written) in found["real"].items():
        assert written and found["free"][name] == (hits, False)
