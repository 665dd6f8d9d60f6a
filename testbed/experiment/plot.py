"""The plot of an experiment: a panel per quantity, a line or bars per figure and series; live solid, sim dashed.

Matplotlib is told to draw without a screen, and to draw the same file for the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas

from testbed.errors import HostError
from testbed.experiment.file import Experiment, Figure, Variant
from testbed.experiment.judge import Outcome, Values
from testbed.metrics.expression import UnknownMetricError, figure
from testbed.runtime.plan import World

_COLUMNS = 2
_PANEL_INCHES = (4.4, 3.2)
_STYLES: Mapping[World, tuple[str, str]] = {"live": ("-", "o"), "sim": ("--", "x")}

Line = tuple[str, World, list[tuple[Variant, float]]]
"""Label, world, and the value of every variant."""


def draw(outcome: Outcome, worlds: Sequence[World], path: Path) -> None:
    """Draw the figures of some worlds; nothing if no figure has a panel.

    Raises:
        HostError: the file cannot be written.
    """
    experiment = outcome.experiment
    panels: dict[str, list[Line]] = {}
    for wanted in experiment.figures:
        if wanted.panel:
            panels.setdefault(wanted.panel, []).extend(_lines(outcome, wanted, worlds))
    if not any(panels.values()):
        return
    columns = min(_COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    canvas = Canvas(figsize=(_PANEL_INCHES[0] * columns, _PANEL_INCHES[1] * rows + 0.5), layout="constrained")
    FigureCanvasAgg(canvas)
    canvas.suptitle(experiment.title, fontsize=10, wrap=True)
    axes = canvas.subplots(rows, columns, squeeze=False)
    for ax, (title, lines) in zip(axes.flat, panels.items(), strict=False):
        _draw_panel(ax, experiment, lines)
        ax.set_title(title, fontsize=9)
    for ax in list(axes.flat)[len(panels) :]:
        ax.set_visible(False)
    try:
        with mpl.rc_context({"svg.hashsalt": experiment.name, "svg.fonttype": "none"}):
            canvas.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise HostError(f"{path}: cannot be written ({error.strerror}).") from error


def _lines(outcome: Outcome, wanted: Figure, worlds: Sequence[World]) -> list[Line]:
    """One line per world and series; variants without the figure are left out."""
    lines: list[Line] = []
    for world in worlds:
        by_series: dict[str, list[tuple[Variant, float]]] = {}
        for variant in outcome.experiment.variants:
            value = value_of(wanted, outcome.measured.get(world, {}).get(variant.name, {}))
            if value is not None:
                by_series.setdefault(variant.series, []).append((variant, value))
        for series, points in by_series.items():
            lines.append((f"{wanted.label}, {series}" if series else wanted.label, world, points))
    return lines


def value_of(wanted: Figure, values: Values) -> float | None:
    """A figure of one variant; None where the variant has not run or lacks what it names."""
    try:
        return figure(wanted.value, values)
    except UnknownMetricError:
        return None


def _draw_panel(ax: Axes, experiment: Experiment, lines: Sequence[Line]) -> None:
    plot = experiment.plot
    labels = list(dict.fromkeys(label for label, _, _ in lines))
    worlds = {world for _, world, _ in lines}
    names = [variant.name for variant in experiment.variants]
    by_name = plot.kind == "bar" or experiment.variants[0].x is None
    width = 0.8 / max(1, len(lines))
    for number, (label, world, points) in enumerate(lines):
        color, told = f"C{labels.index(label)}", f"{label}, {world}" if len(worlds) > 1 else label
        values = [value for _, value in points]
        places = [float(names.index(v.name)) if by_name or v.x is None else v.x for v, _ in points]
        if plot.kind == "bar":
            offset = (number - (len(lines) - 1) / 2) * width
            hatch = "///" if world == "sim" and len(worlds) > 1 else None
            ax.bar(
                [place + offset for place in places],
                values,
                width,
                color=color,
                label=told,
                hatch=hatch,
                edgecolor="white",
            )
        else:
            style, marker = _STYLES[world] if len(worlds) > 1 else _STYLES["live"]
            ax.plot(places, values, color=color, linestyle=style, marker=marker, markersize=4, label=told)
    if by_name:
        ax.set_xticks(range(len(names)), names, rotation=20, ha="right")
    ax.set_xlabel(plot.x_label, fontsize=8)
    ax.tick_params(labelsize=8)
    if "x" in plot.log and not by_name:
        ax.set_xscale("log")
        places = sorted({variant.x for variant in experiment.variants if variant.x is not None})
        ax.set_xticks(places, [f"{place:.3g}" for place in places])
        ax.set_xticks([], minor=True)
    if "y" in plot.log:
        ax.set_yscale("log")
    else:
        ax.set_ylim(bottom=0)
    if lines:
        ax.legend(fontsize=6)
