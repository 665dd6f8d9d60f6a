"""The plots of ``testbed paper``: one PNG per figure, a panel per quantity; ours as lines, the paper's points beside.

Drawn from rows alone. Matplotlib is told to draw without a screen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas

from testbed.errors import HostError
from testbed.paper.figures.figure import Figure
from testbed.paper.rows import Row

_COLUMNS = 3
_PANEL_INCHES = (4.2, 3.2)


def draw(figure: Figure, rows: Iterable[Row], path: Path, *, note: str = "") -> None:
    """Write the plot of one figure; nothing if it has no panels.

    Raises:
        HostError: the file cannot be written.
    """
    panels: dict[str, list[Row]] = {}
    for row in rows:
        if row.panel:
            panels.setdefault(row.panel, []).append(row)
    if not panels:
        return
    columns = min(_COLUMNS, len(panels))
    lines = math.ceil(len(panels) / columns)
    canvas = Canvas(figsize=(_PANEL_INCHES[0] * columns, _PANEL_INCHES[1] * lines + 0.5), layout="constrained")
    FigureCanvasAgg(canvas)
    canvas.suptitle(f"{figure.name}: {figure.title}{f' ({note})' if note else ''}", fontsize=10, wrap=True)
    axes = canvas.subplots(lines, columns, squeeze=False)
    for ax, (title, content) in zip(axes.flat, panels.items(), strict=False):
        _draw_panel(ax, content)
        ax.set_title(title, fontsize=9)
        ax.set_xlabel(figure.x_label, fontsize=8)
        ax.tick_params(labelsize=8)
    for ax in list(axes.flat)[len(panels) :]:
        ax.set_visible(False)
    try:
        canvas.savefig(path, dpi=110)
    except OSError as error:
        raise HostError(f"{path}: cannot be written ({error.strerror}).") from error


def _draw_panel(ax: Axes, rows: Sequence[Row]) -> None:
    """A line and the paper's crosses per system, in one colour."""
    for i, system in enumerate(dict.fromkeys(row.system for row in rows)):
        mine = [row for row in rows if row.system == system]
        label = system or "ours"
        ours = [(row.x, row.ours) for row in mine if row.ours is not None]
        paper = [(row.x, row.paper) for row in mine if row.paper is not None]
        if ours:
            ax.plot(*zip(*ours, strict=True), color=f"C{i}", marker=".", label=label)
        if paper:
            ax.plot(*zip(*paper, strict=True), color=f"C{i}", marker="x", linestyle="none", label=f"{label}, paper")
    ax.set_ylim(bottom=0)
    ax.legend(fontsize=6)
