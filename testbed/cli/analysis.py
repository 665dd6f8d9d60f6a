"""``testbed plan``, ``ratio`` and ``workingset``: the analysis library as tables, the paper's figures beside ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from testbed.analysis import bottleneck as bn
from testbed.analysis.ratio import RATIO_MODELS, ratio_model
from testbed.analysis.workingset import GB, PAPER_POINTS, implied_bytes_per_token, stretched, working_set_bytes
from testbed.errors import ConfigError, HostError
from testbed.models.model import model_named
from testbed.units import GBIT
from topologies.tomlinput import nearest

T = TypeVar("T")

_EQUATIONS = {
    bn.Resource.SNIC: "assumed full",
    bn.Resource.PE_CNIC_READ: "1",
    bn.Resource.PE_CNIC_WRITE: "2-3",
    bn.Resource.DE_CNIC_READ: "4-5",
    bn.Resource.DE_CNIC_WRITE: "6-7",
    bn.Resource.PE_DRAM: "4.2",
    bn.Resource.DE_DRAM: "8",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The arguments of ``testbed plan``, as typed: Gbit/s and GB/s; numbers are text so that they stay exact."""

    gpus: int = 8
    s: str = "1"
    cnic_gbit: str = "400"
    memory_gb_s: str = "500"
    prefill: int = 2
    decode: int = 4
    plot: Path | None = None

    @property
    def setting(self) -> bn.Setting:
        """The node.

        Raises:
            ConfigError: a number that is none, or a node that cannot be.
        """
        return bn.setting(
            gpus=self.gpus,
            s=fraction("--s", self.s),
            cnic_bytes_per_s=fraction("--cnic-gbit", self.cnic_gbit) * GBIT / 8,
            memory_bytes_per_s=fraction("--memory-gb-s", self.memory_gb_s) * GB,
        )


def plan(request: PlanRequest) -> int:
    """Print equations 1-9 for a cluster.

    Raises:
        ConfigError: input that is no cluster, or a figure that cannot be written.
    """
    at, pd = request.setting, bn.pd_ratio(request.prefill, request.decode)
    interval = bn.pd_interval(at)
    if request.plot is not None:
        _save_region(at, pd, request.plot)
    out = Console(highlight=False)
    table = Table(title=_plan_title(request, at), title_justify="left")
    for column in ("resource", "equation", "use at full storage rate", "", "bound"):
        table.add_column(column)
    for resource, use in bn.uses(at, pd).items():
        state = "" if use < 1 else "full" if use == 1 else "too much"
        table.add_row(
            resource.value, _EQUATIONS[resource], f"{_exact(use)} = {float(use):.1%}", state, _bound(interval, resource)
        )
    out.print(table)
    for line in _plan_lines(request, at, pd, interval):
        out.print(line, soft_wrap=True)
    if request.plot is not None:
        out.print(f"Region plot: {request.plot}", soft_wrap=True)
    return 0


def _plan_title(request: PlanRequest, at: bn.Setting) -> str:
    memory = float(at.memory_ratio)
    return f"{request.prefill}P{request.decode}D, g = {at.gpus}, s = {at.s}, M/(Bs) = {memory:g}"


def _plan_lines(request: PlanRequest, at: bn.Setting, pd: Fraction, interval: bn.PdInterval) -> list[str]:
    first = ", ".join(r.value for r in bn.binding(at, pd))
    lines = [f"P/D = {_exact(pd)}; used most: {first}."]
    if interval.lower is None:
        lines.append(f"Storage is never the limit: at s = g no P/D leaves room in {interval.lower_resource.value}.")
    elif interval.empty:
        reasons = [r.value for r, holds in interval.always.items() if not holds]
        why = (
            f"{' and '.join(reasons)} cannot follow at any P/D"
            if reasons
            else (
                f"{interval.lower_resource.value} needs P/D >= {_exact(interval.lower)}, "
                f"{_names(interval.upper_resources)} needs P/D <= {_exact(interval.upper)}"
            )
        )
        lines.append(f"Storage is the limit at no P/D: {why}.")
    else:
        lines.append(
            f"Storage is the limit for {_exact(interval.lower)} <= P/D <= {_exact(interval.upper)}: below, "
            f"{interval.lower_resource.value} binds first, above, {_names(interval.upper_resources)}."
        )
    share = bn.storage_share(at, pd)
    if share < 1:
        lines.append(f"Storage gets at least {_exact(share)} = {float(share):.1%} of its rate.")
    gain = bn.speedup_bound(request.prefill, request.decode)
    lines.append(f"JCT speed-up over reading through prefill nodes alone: at most (P+D)/P = {_exact(gain)}.")
    return lines


def _names(resources: Sequence[bn.Resource]) -> str:
    return " and ".join(r.value for r in resources)


def _bound(interval: bn.PdInterval, resource: bn.Resource) -> str:
    if resource in interval.uppers:
        return f"P/D <= {_exact(interval.uppers[resource])}"
    if resource in interval.always:
        return "holds at any P/D" if interval.always[resource] else "holds at no P/D"
    if resource is interval.lower_resource:
        return "no P/D" if interval.lower is None else f"P/D >= {_exact(interval.lower)}"
    return ""


def _save_region(at: bn.Setting, pd: Fraction, path: Path) -> None:
    from testbed.analysis.region_plot import region_figure  # noqa: PLC0415  (matplotlib takes a second to load)

    try:
        region_figure(at, pd).savefig(path, dpi=150)
    except OSError as error:
        raise HostError(f"--plot {path}: cannot be written ({error.strerror}).") from error
    except ValueError as error:
        raise ConfigError(f"--plot {path}: {str(error).splitlines()[0].rstrip('.')}.") from error


# --- ratio ---------------------------------------------------------------------------------------------------------


def ratio(models: Sequence[str], contexts: Sequence[int], append_tokens: int, *, indexer: bool) -> int:
    """Print GB/PFLOP for models (none: all) and context lengths.

    Raises:
        ConfigError: an unknown model (with the nearest name) or a length below 1.
    """
    for name in models:
        if name not in RATIO_MODELS and (hint := nearest(name, RATIO_MODELS)):
            raise ConfigError(f"unknown model {name!r}{hint}.")
    chosen = [ratio_model(name, indexer=indexer) for name in models or RATIO_MODELS]
    table = Table(
        title=f"KV to load per prefill compute, GB/PFLOP, {append_tokens} tokens appended", title_justify="left"
    )
    for column in ("model", "KV B/token", "context", "FLOP/new token", "ours", "paper", "difference"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for model in chosen:
        for context in contexts:
            ours, paper = model.ratio(context, append_tokens), model.paper_ratio(context, append_tokens)
            table.add_row(
                model.title,
                f"{model.kv_bytes_per_token:,}",
                f"{context:,}",
                f"{model.flops_per_new_token(context) / 1e9:.1f} G",
                f"{ours:.3g}",
                "" if paper is None else f"{paper:g}",
                "" if paper is None else f"{ours / paper - 1:+.1%}",
            )
    out = Console(highlight=False)
    out.print(table)
    for model in chosen:
        if model.remark:
            out.print(f"{model.title}: {model.remark}.", soft_wrap=True)
    return 0


# --- working set ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkingSetRequest:
    """The arguments of ``testbed workingset``. ``jct_s`` has one value per ``aps``, or one for all."""

    model: str
    indexer: bool
    aps: Sequence[float]
    jct_s: Sequence[float]
    total_tokens: float
    r: Sequence[float]


def workingset(request: WorkingSetRequest) -> int:
    """Print Little's law for each arrival rate and each r.

    Raises:
        ConfigError: values that are none, or a number of JCTs that does not fit.
    """
    jcts = request.jct_s if len(request.jct_s) != 1 else list(request.jct_s) * len(request.aps)
    if len(jcts) != len(request.aps):
        raise ConfigError(
            f"--jct-s has {len(jcts)} values, but --aps has {len(request.aps)}; give one for each, or one."
        )
    model = model_named(request.model)
    size = (model.with_indexer() if request.indexer else model).kv_bytes_per_token
    table = Table(title=f"Working set of {model.title}, {size:,} B per token", title_justify="left")
    for column in ("APS", "r", "JCT", "agents", "GB at this APS", "GB at r x APS", "test hours", "test cost"):
        table.add_column(column, justify="right")
    for aps, jct_s in zip(request.aps, jcts, strict=True):
        for r in request.r:
            row = stretched(r, aps, jct_s, request.total_tokens, size)
            table.add_row(
                f"{aps:g}",
                f"{r:g}",
                f"{row.jct_s:,.0f} s",
                f"{aps * row.jct_s:,.0f}",
                f"{row.same_rate_bytes / GB:,.0f}",
                f"{row.scaled_rate_bytes / GB:,.0f}",
                f"x {row.test_hours:g}",
                f"x {row.test_cost:g}",
            )
    out = Console(highlight=False)
    out.print(table)
    for aps, jct_s, stated_gb in PAPER_POINTS if model.name == "ds-660b" else ():
        if (aps, jct_s) in zip(request.aps, jcts, strict=True):
            ours = working_set_bytes(aps, jct_s, request.total_tokens, size) / GB
            implied = implied_bytes_per_token(stated_gb, aps, jct_s, request.total_tokens)
            out.print(
                f"At {aps:g} APS the paper states {stated_gb:g} GB: ours {ours / stated_gb - 1:+.0%}; "
                f"it would take {implied:,.0f} B per token.",
                soft_wrap=True,
            )
    return 0


# --- text to numbers -----------------------------------------------------------------------------------------------


def fraction(option: str, text: str) -> Fraction:
    """An exact number: "1", "0.5" or "1/2".

    Raises:
        ConfigError: anything else.
    """
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise ConfigError(f"{option} is {text!r}, but it must be a number such as 1, 0.5 or 1/2.") from None


def numbers(option: str, text: str, kind: Callable[[str], T]) -> list[T]:
    """Numbers separated by commas.

    Raises:
        ConfigError: a part that is none, or no part at all.
    """
    try:
        values = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"{option} is {text!r}, but it must be numbers separated by commas.") from None
    if not values:
        raise ConfigError(f"{option} is empty; give at least one number.")
    return values


def _exact(value: Fraction) -> str:
    """7/2; a decimal where the exact fraction would be unreadable."""
    return str(value) if value.denominator < 1000 else f"{float(value):.4g}"
