"""Break one thing at a time: each must turn a run red, and for the right reason.

The breakage is made in the parent, which the roles are forked from; the run itself is the shipped one, made small.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emulators.cluster import describe_roles
from emulators.dram_buffer import DramBuffer
from emulators.prefill_engine import PrefillEngine
from emulators.storage_server import StorageServer
from testbed.fabric.live import link_control
from testbed.fabric.live.network import Network
from testbed.kvmodel.device import KvDevice
from testbed.metrics.summary import Summary
from testbed.protocol import machine as mc
from testbed.protocol import messages as m
from testbed.protocol.grants import GrantRef
from testbed.runtime import roles
from tests.live.small import run_small

pytestmark = pytest.mark.live


def alter(monkeypatch: pytest.MonkeyPatch, machine: type, change: Callable[[mc.Action], list[mc.Action]]) -> None:
    """Pass every action of a kind of machine through ``change``."""
    handle = machine.handle  # type: ignore[attr-defined]

    def altered(self: object, event: mc.Event, now_ns: int) -> list[mc.Action]:
        return [b for a in handle(self, event, now_ns) for b in change(a)]

    monkeypatch.setattr(machine, "handle", altered)


def wrong_bytes_found(summary: Summary) -> bool:
    """Whether a landing was refused for its bytes. Which end of the write tells first is a matter of milliseconds."""
    said = " ".join(summary.failures)
    return "WrongBlockLanded" in said or ("WriteRefused" in said and "not its bytes" in said)


def test_nothing_broken_is_green(tmp_path: Path) -> None:
    summary = run_small(tmp_path, "basic", "dualpath")
    assert (summary.failures, summary.invalid_reasons) == ((), ())
    assert all(system.tokens_verified == system.tokens_emitted > 0 for system in summary.systems)


def test_a_layer_block_at_the_wrong_offset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def swap(action: mc.Action) -> list[mc.Action]:
        if isinstance(action, mc.Write) and len(action.pieces) > 1:
            pieces = (action.pieces[1], action.pieces[0], *action.pieces[2:])
            return [dataclasses.replace(action, pieces=pieces)]
        return [action]

    alter(monkeypatch, DramBuffer, swap)
    assert wrong_bytes_found(run_small(tmp_path, turns=1, deadline_s=3))


def test_a_layer_that_is_never_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(action: mc.Action) -> list[mc.Action]:
        return [] if isinstance(action, mc.Send) and isinstance(action.message, m.LoadLayers) else [action]

    alter(monkeypatch, PrefillEngine, forget)
    assert "TimedOut" in " ".join(run_small(tmp_path, turns=1, deadline_s=1).failures)


def test_a_layer_that_is_not_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = KvDevice.prefill

    def skip(self: KvDevice, action: mc.ComputePrefill) -> dict[str, int]:
        before = self._data.copy()
        tokens = prefill(self, action)
        if action.layer_begin == 0:  # the forward goes on, the bytes of these layers do not
            self._data[:] = before
        return tokens

    monkeypatch.setattr(KvDevice, "prefill", skip)
    assert wrong_bytes_found(run_small(tmp_path, turns=1, deadline_s=3))


def test_a_layer_that_is_computed_from_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seals are right, for they seal what was computed; the tokens are not."""
    digest = KvDevice._digest_loaded

    def forgetful(self: KvDevice, item: mc.PrefillItem, cached: int, begin: int, end: int) -> Any:
        return np.zeros_like(digest(self, item, cached, begin, end))

    monkeypatch.setattr(KvDevice, "_digest_loaded", forgetful)
    assert "wrong tokens" in " ".join(run_small(tmp_path, turns=1).failures)


def test_a_stale_block_from_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first: list[int] = []

    def stale(action: mc.Action) -> list[mc.Action]:
        if isinstance(action, mc.FetchBlock):
            first.append(action.key)
            return [dataclasses.replace(action, key=first[0])]
        return [action]

    alter(monkeypatch, StorageServer, stale)
    assert wrong_bytes_found(run_small(tmp_path, turns=1, deadline_s=3))


def test_a_lane_filter_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = Network.build

    def without(self: Network) -> None:
        build(self)
        link_control.remove_lane_filter(self, "pe0.cnic0.read")

    monkeypatch.setattr(Network, "build", without)
    summary = run_small(tmp_path, turns=1)
    assert summary.exit_code == 3
    assert "pe0.cnic0.read lacks the filter" in " ".join(summary.invalid_reasons)


@pytest.mark.parametrize("share", [pytest.param(0.95, marks=pytest.mark.nightly), 1.05])  # test_network measures both
def test_a_link_shaped_5_percent_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    build = Network.build

    def off(self: Network) -> None:
        build(self)
        for way in ("read", "write"):
            link_control.set_rate(self, f"de0.cnic0.{way}", round(self.spec.cnic_rate_bps * share))

    monkeypatch.setattr(Network, "build", off)
    summary = run_small(tmp_path, turns=1)
    assert summary.exit_code == 3
    assert "Calibration: de0.cnic0" in " ".join(summary.invalid_reasons)


def test_a_cnic_bypassed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Local H2D over the copy engine's direct link: right tokens, and a ledger that misses the CNIC's bytes."""

    def by_copy_engine(ref: GrantRef) -> GrantRef:
        return GrantRef("pe0gpu0.copy", ref.grant_id, ref.epoch, ref.size_bytes)

    def grant(action: mc.Action) -> list[mc.Action]:
        if isinstance(action, mc.OpenGrant):
            return [dataclasses.replace(action, ref=by_copy_engine(action.ref))]
        if isinstance(action, mc.Send) and isinstance(action.message, m.LoadLayers) and action.to == "pe0":
            fields = {name: getattr(action.message, name) for name in action.message.__struct_fields__}
            return [mc.Send(action.to, m.LoadLayers(**{**fields, "grant": by_copy_engine(action.message.grant)}))]
        return [action]

    def listening(*args: Any, **kwargs: Any) -> Any:
        more = {"pe0gpu0": ("pe0gpu0.copy",)}  # the node's DRAM posts from its own side of the path that is granted
        return [
            dataclasses.replace(role, endpoints=(*role.endpoints, *more.get(role.name, ())))
            for role in describe_roles(*args, **kwargs)
        ]

    alter(monkeypatch, PrefillEngine, grant)
    monkeypatch.setattr(roles, "describe_roles", listening)
    summary = run_small(tmp_path, "basic")
    assert summary.failures == ()
    assert summary.exit_code == 3
    assert "the traffic ledger is off" in " ".join(summary.invalid_reasons)
    assert "pe0.cnic0" in " ".join(summary.invalid_reasons)
