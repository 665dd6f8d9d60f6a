"""Runs test functions inside a sandbox: ``in_sandbox(fn)`` returns fn's result or raises what it raised."""

from __future__ import annotations

import functools
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from testbed.errors import HostError
from testbed.fabric.live.network import Network
from testbed.fabric.live.sandbox import run_in_sandbox
from testbed.fabric.spec import ClusterSpec

Result = TypeVar("Result")

MBIT = 1_000_000


class SandboxFailure(AssertionError):
    """The function failed inside; the message is its traceback."""


def in_sandbox(function: Callable[[], Result]) -> Result:
    """Run ``function`` in a fresh sandbox and return its (picklable) result.

    Raises:
        SandboxFailure: it raised; the message holds the traceback.
        HostError: the host allows no sandbox.
    """
    with tempfile.TemporaryDirectory(prefix="testbed-") as folder:
        answer = Path(folder, "answer")

        def entry() -> int:
            try:
                result: tuple[bool, object] = (True, function())
            except BaseException:
                result = (False, traceback.format_exc())
            answer.write_bytes(pickle.dumps(result))
            return 0

        code = run_in_sandbox(entry)
        if not answer.exists():
            raise SandboxFailure(f"the sandbox ended with {code} and no answer")
        good, value = pickle.loads(answer.read_bytes())
    if not good:
        raise SandboxFailure(value)
    return value  # type: ignore[no-any-return]


@functools.cache
def why_not_live() -> str:
    """Why this host cannot run live tests, in one sentence; empty if it can. Tried, not guessed."""
    try:
        in_sandbox(lambda: Network(small_spec()).build())
    except (HostError, SandboxFailure) as error:
        return str(error).strip().splitlines()[-1]
    return ""


def skip_unless_live() -> None:
    """Skip the calling test with the exact reason where the host cannot run it."""
    reason = why_not_live()
    if reason:
        if os.environ.get("TESTBED_REQUIRE_LIVE"):
            pytest.fail(f"live tests are required here, but: {reason}")
        pytest.skip(reason)


def small_spec(
    *, prefill: int = 1, decode: int = 1, gpus: int = 2, servers: int = 1, mbit: int = 100, storage_mbit: int = 0
) -> ClusterSpec:
    """A cluster small enough for a test: all NICs at ``mbit``, PCIe and DRAM in the paper's proportions."""
    return ClusterSpec(
        name="test",
        prefill_nodes=prefill,
        decode_nodes=decode,
        gpus_per_node=gpus,
        storage_servers=servers,
        cnic_rate_bps=mbit * MBIT,
        snic_rate_bps=mbit * MBIT,
        pcie_rate_bps=mbit * MBIT * 128 // 100,
        dram_rate_bps=mbit * MBIT * 10,
        storage_rate_bps=storage_mbit * MBIT,
    )
