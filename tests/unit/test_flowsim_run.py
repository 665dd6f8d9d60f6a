"""``simulate`` as a whole: what every run keeps, whatever the system; the same every time; bad input."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import fields
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from testbed.errors import ConfigError
from testbed.flowsim.calibration import load_calibration
from testbed.flowsim.run import SYSTEM_NAMES, FlowCase, FlowResult, _starts_ns, _workload, simulate
from testbed.flowsim.state import NONE, SIDE_DE, SIDE_NONE, SIDE_PE
from tests.support.flow_world import FlowWorld, arrive, flow_world, settings_for

BLOCK = 64


def case_of(system: str, **changed: object) -> FlowCase:
    """24 agents of the 32K trace on 1P1D, DS 27B."""
    values = {"model": "ds-27b", "trace": "32K", "prefill_nodes": 1, "decode_nodes": 1, "agents": 24} | changed
    return FlowCase(system=system, **values)  # type: ignore[arg-type]


CASES = {name: case_of(name) for name in SYSTEM_NAMES} | {
    "660b": case_of("dualpath", model="ds-660b", trace="64K", prefill_nodes=2, decode_nodes=4),
    "qwen": case_of("dualpath", model="qwen-32b", decode_nodes=2),
    "layers": case_of("dualpath", options=(("steps", 30.0),)),
    "arrivals": case_of("dualpath", aps=0.5, seed=2),
    "crowd": case_of("dualpath", agents=600, append_scale=2.0),
}


@cache
def run(name: str) -> FlowResult:
    """A case, simulated once."""
    return simulate(CASES[name])


@cache
def run_openly(name: str) -> FlowWorld:
    """The same case with everything in reach, run until nothing is left to happen."""
    case = CASES[name]
    offset, append, generate = _workload(case)
    pairs = list(zip(append.tolist(), generate.tolist(), strict=True))
    turns = [pairs[a:b] for a, b in pairwise(offset)]
    world = arrive(flow_world(settings_for(case), turns), _starts_ns(case))
    world.run()
    world.drain()
    return world


def digest(result: FlowResult) -> str:
    """Of all numbers of a result."""
    state = hashlib.sha256()
    for field in fields(result):
        value = getattr(result, field.name)
        state.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
    return state.hexdigest()


# --- what every run keeps --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_every_round_completes_in_order(name: str) -> None:
    result, (offset, append, _) = run(name), _workload(CASES[name])
    assert result.finished
    assert result.requests == len(append) == offset[-1]
    times = [
        result.submitted_s, result.scheduled_s, result.allocated_s, result.read_s, result.first_token_s,
        result.second_token_s, result.last_token_s, result.completed_s,
    ]  # fmt: skip
    for earlier, later in pairwise(times):
        assert (earlier <= later).all()
    assert (np.diff(result.submitted_s) >= 0).all()
    assert result.jct_s == pytest.approx(result.completed_s.max() - result.submitted_s.min())
    several = result.generate_tokens > 2
    assert (result.second_token_s[several] < result.last_token_s[several]).all()


@pytest.mark.parametrize("name", CASES)
def test_an_agents_rounds_follow_one_another(name: str) -> None:
    """Prompts are the past and what is appended; hits are the whole blocks of the past."""
    result, (offset, append, generate) = run(name), _workload(CASES[name])
    for agent in range(CASES[name].agents):
        mine = np.flatnonzero(result.agent == agent)
        here = slice(offset[agent], offset[agent + 1])
        assert (result.append_tokens[mine] == append[here]).all()
        assert (result.generate_tokens[mine] == generate[here]).all()
        past = np.concatenate([[0], np.cumsum(append[here] + generate[here])[:-1]])
        assert (result.prompt_tokens[mine] == past + append[here]).all()
        assert (result.hit_tokens[mine] == np.maximum(past - 1, 0) // BLOCK * BLOCK).all()
        assert (result.submitted_s[mine][1:] == result.completed_s[mine][:-1]).all()
    sides = {"basic": {SIDE_PE}, "layerwise": {SIDE_PE}, "sgl-mc": {SIDE_PE}, "oracle": {SIDE_NONE}}
    wanted = sides.get(name, {SIDE_PE, SIDE_DE})
    assert set(result.side[result.hit_tokens > 0].tolist()) == wanted
    assert set(result.side[result.hit_tokens == 0].tolist()) == {SIDE_NONE}


@pytest.mark.parametrize("name", CASES)
def test_storage_reads_the_hits_and_nothing_else(name: str) -> None:
    result, settings = run(name), settings_for(CASES[name])
    hits = result.hit_tokens.sum() * settings.kv_bytes
    if name == "oracle":
        assert result.snic_bytes.sum() == 0
    elif name == "sgl-mc":  # all agents fit its DRAM tier
        assert result.snic_bytes.sum() == 0 < hits
    else:
        assert result.snic_bytes.sum() == pytest.approx(hits, rel=1e-4)
    assert (result.snic_bytes <= settings.snic_rate * settings.window_ns * (1 + 1e-4)).all()
    for node in range(settings.prefill_nodes + settings.decode_nodes):
        if settings.side_policy == 0 and node >= settings.prefill_nodes:
            assert result.snic_bytes[:, node].sum() == 0


@pytest.mark.parametrize("name", CASES)
def test_the_cluster_is_as_it_was(name: str) -> None:
    """Pages, HBM, loads and queues; and what was moved is what the result says."""
    world, result = run_openly(name), run(name)
    s, c, q, r, _, h = world.parts
    assert (r.completed.max() - r.submitted.min()) / 1e9 == result.jct_s
    assert (c.pages_free == s.dram_pages).all()
    assert (c.hbm_free == s.de_hbm_pages).all()
    assert (c.hbm_unplanned == s.de_hbm_pages).all()
    for idle in (
        c.read_queue, c.pe_tokens, c.de_tokens, c.de_sequences, c.group_tokens, c.busy, c.active, c.contexts,
        c.leave_size, h.size[:1], c.counts[:1],
    ):  # fmt: skip
        assert (idle == 0).all()
    for ends in (q.prefill, q.decode, q.private, q.memory, q.runnable, q.hbm, q.joining):
        assert (ends == NONE).all()
    assert (r.computed == r.prompt).all()


@pytest.mark.parametrize("name", [n for n in CASES if n != "oracle"])
def test_new_blocks_are_written_once(name: str) -> None:
    """Every full block of an agent's whole context, on every replica."""
    world = run_openly(name)
    s, r, offset = world.settings, world.requests, world.agents.offset
    last = offset[1:] - 1
    blocks = (r.prompt[last] + r.generate[last] - 1) // BLOCK
    assert world.cluster.snic_tx_bytes.sum() == pytest.approx(blocks.sum() * BLOCK * s.kv_bytes * s.replicas)


def test_utilisation_is_a_share() -> None:
    for name in CASES:
        assert all(0 <= share <= 1.001 for share in run(name).utilisation.values()), name
    assert run("crowd").utilisation["pe_snic_read"] > 0.5


def test_a_horizon_ends_a_run() -> None:
    whole, cut = run("arrivals"), simulate(case_of("dualpath", aps=0.5, seed=2, horizon_s=60.0))
    assert not cut.finished
    inside = int((whole.completed_s <= 60.0).sum())
    assert cut.requests == inside < whole.requests
    assert cut.completed_s.max() == whole.completed_s[whole.completed_s <= 60.0].max()


# --- the same every time ---------------------------------------------------------------------------------------------


def test_the_same_case_gives_the_same_arrays() -> None:
    assert digest(simulate(CASES["dualpath"])) == digest(run("dualpath"))
    assert digest(simulate(case_of("dualpath", seed=1))) != digest(run("dualpath"))


def test_hashing_does_not_matter() -> None:
    code = (
        "from tests.unit.test_flowsim_run import CASES, digest, simulate\n"
        "print(digest(simulate(CASES['dualpath'])), digest(simulate(CASES['arrivals'])))"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for seed in ("1", "2")
    ]
    assert said[0] == said[1] == [digest(run("dualpath")), digest(run("arrivals"))]


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"system": "fast"}, r"unknown system 'fast'; choose one of oracle, dualpath, .*\."),
        ({"model": "gpt"}, r"unknown model 'gpt'; choose one of ds-660b, .*\."),
        ({"trace": "8K"}, r".*8K.*32K.*"),
        ({"prefill_nodes": 0}, r"prefill_nodes is 0, but it must be at least 1\."),
        ({"decode_nodes": -1}, r"decode_nodes is -1, but it must be at least 1\."),
        ({"agents": 0}, r"agents is 0, but it must be at least 1\."),
        ({"aps": -0.1}, r"aps and horizon_s must not be negative; .*"),
        ({"horizon_s": -1.0}, r"aps and horizon_s must not be negative; .*"),
        ({"append_scale": 0.0}, r".*append_scale and generate_scale are positive\."),
        ({"options": (("speed", 1.0),)}, r"unknown option 'speed'; choose one of recompute_fraction, .*\."),
        ({"seed": -1}, r"seed is -1, but it must be at least 0\."),
        ({"options": (("steps", 0.0),)}, r"option steps is 0, but it must be between 1 and 64\."),
        ({"options": (("steps", float("nan")),)}, r"option steps is nan, but it must be between .*\."),
        ({"options": (("kv_byte_scale", 0.0),)}, r"option kv_byte_scale is 0, but it must be between .*\."),
        ({"options": (("recompute_fraction", 1.5),)}, r"option recompute_fraction is 1.5, but .* between 0 and 1\."),
        ({"options": (("storage_limit_gb_s", 0.0),)}, r"option storage_limit_gb_s is 0, but it must be between .*\."),
        ({"options": (("tool_delay_s", -1.0),)}, r"option tool_delay_s is -1, but it must be between 0 and .*\."),
        ({"aps": float("nan")}, r"aps and horizon_s must not be negative; .*"),
    ],
)
def test_a_case_that_cannot_be(changed: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{sentence}$"):
        case_of(**{"system": "dualpath", **changed})  # type: ignore[arg-type]


def test_a_request_that_fits_nowhere() -> None:
    with pytest.raises(ConfigError, match=r"^ds-27b 32K: a request takes \d+ blocks, the DRAM of a node holds \d+\.$"):
        simulate(case_of("dualpath", options=(("kv_byte_scale", 200.0),)))


SHIPPED = (Path(__file__).parents[2] / "testbed/flowsim/calibration.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("fetch_interval_s = ", "# ", r"{file}: fetch_interval_s is missing\."),
        ("[derived]", "tuned = 1\n[derived]", r"{file}: unknown value tuned; it holds allocation_overhead_s, .*\."),
        ("[derived]", "[guessed]", r"{file}: guessed is not a table of a calibration; there are \[fitted\] and .*\."),
        ("effective_pflops = ", "effective_pflops = 7#", r"calibration: effective_pflops is 7, but it must be .*\."),
        ("effective_pflops = ", "effective_pflops = nan#", r"calibration: effective_pflops is nan, but .*\."),
        ("effective_pflops = ", 'effective_pflops = "x"#', r"{file}: effective_pflops is 'x', but .* a number\."),
        ("effective_pflops = ", "effective_pflops = true#", r"{file}: effective_pflops is True, but .* a number\."),
        ("[fitted]", "[fitted", r"{file} cannot be read \(.*\)\."),
    ],
)
def test_a_calibration_that_cannot_be(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    file = tmp_path / "calibration.toml"
    assert old in SHIPPED
    file.write_text(SHIPPED.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"^{sentence.replace('{file}', str(file))}$"):
        load_calibration(file)


def test_a_calibration_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml cannot be read"):
        load_calibration(tmp_path / "nowhere.toml")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary\.toml cannot be read"):
        load_calibration(binary)


def test_the_shipped_calibration_is_one(tmp_path: Path) -> None:
    copy = tmp_path / "copy.toml"
    copy.write_text(SHIPPED, encoding="utf-8")
    assert load_calibration(copy) == load_calibration()
