"""The free parameters of the flow simulation: what was fitted, on what, and what was not.

``calibration.toml`` beside this file is the only place that holds them. Fitted values use the 660B/64K/2,048-agent
cell of Figure 7, the 0.2 APS column of Figure 12 (left) and the 27B/64K/2,048 Basic cell, nothing else.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path

from testbed.errors import ConfigError

_RANGES: dict[str, tuple[float, float]] = {
    "storage_rate_gb_s": (0.1, 50.0),
    "effective_pflops": (0.01, 2.0),
    "prefill_layer_overhead_ms": (0.0, 100.0),
    "forward_tokens": (64.0, 1e9),
    "fetch_interval_s": (0.0001, 10.0),
    "read_overhead_s": (0.0, 10.0),
    "allocation_overhead_s": (0.0, 10.0),
    "kv_bytes_per_token_27b": (1_000.0, 1_000_000.0),
    "decode_layer_ms_660b": (0.0, 100.0),
    "decode_layer_ms_27b": (0.0, 100.0),
    "decode_layer_ms_qwen": (0.0, 100.0),
    "hbm_read_tb_s": (0.1, 10.0),
    "pe_kv_hbm_gb_660b": (3.5, 80.0),
    "de_kv_hbm_gb_660b": (3.5, 80.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """All free parameters, in the units of their names.

    ``storage_rate_gb_s``: what one SNIC reads from storage at most. ``effective_pflops``: of one GPU, all models.
    ``prefill_layer_overhead_ms``: time of a layer of a forward whatever its batch. ``decode_layer_ms_*``: the same of a
    decode step. ``forward_tokens``: new tokens of one engine in a forward of systems without the quota, at most.
    ``hbm_read_tb_s``: rate at which a decode step reads dense KV. ``pe_kv_hbm_gb_660b``, ``de_..``: HBM
    for KV of a GPU of 660B. ``allocation_overhead_s``: of systems that hold buffers on both sides.
    """

    storage_rate_gb_s: float
    effective_pflops: float
    prefill_layer_overhead_ms: float
    forward_tokens: float
    fetch_interval_s: float
    read_overhead_s: float
    allocation_overhead_s: float
    kv_bytes_per_token_27b: float
    decode_layer_ms_660b: float
    decode_layer_ms_27b: float
    decode_layer_ms_qwen: float
    hbm_read_tb_s: float
    pe_kv_hbm_gb_660b: float
    de_kv_hbm_gb_660b: float

    def __post_init__(self) -> None:
        """Refuse what is out of range.

        Raises:
            ConfigError: naming the value and its range.
        """
        for key, (low, high) in _RANGES.items():
            value = getattr(self, key)
            if not low <= value <= high:
                raise ConfigError(f"calibration: {key} is {value:g}, but it must be between {low:g} and {high:g}.")


def load_calibration(path: Path | None = None) -> Calibration:
    """The shipped calibration, or another file of the same form.

    Raises:
        ConfigError: no such file, no TOML, a missing, unknown, or out-of-range value.
    """
    where = str(path) if path else "the shipped calibration"
    try:
        text = (
            path.read_text(encoding="utf-8")
            if path
            else resources.files("testbed.flowsim").joinpath("calibration.toml").read_text(encoding="utf-8")
        )
        tables = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{where} cannot be read ({error}).") from error
    values: dict[str, float] = {}
    for name, table in tables.items():
        if name not in ("fitted", "derived") or not isinstance(table, dict):
            raise ConfigError(f"{where}: {name} is not a table of a calibration; there are [fitted] and [derived].")
        values.update(table)
    known = {f.name for f in fields(Calibration)}
    if unknown := sorted(set(values) - known):
        raise ConfigError(f"{where}: unknown value {unknown[0]}; it holds {', '.join(sorted(known))}.")
    if missing := sorted(known - set(values)):
        raise ConfigError(f"{where}: {missing[0]} is missing.")
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{where}: {key} is {value!r}, but it must be a number.")
    return Calibration(**values)
