"""The compiler of the flow simulation, with types kept: numba's decorators have none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from numba import njit

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """Compile on first call, cached on disk."""
    result: F = njit(cache=True)(function)
    return result


def inlined(function: F) -> F:
    """Compile into the caller: for what costs less than a call."""
    result: F = njit(cache=True, inline="always")(function)
    return result
