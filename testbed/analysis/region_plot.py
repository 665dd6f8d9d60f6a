"""The region of (s/g, P/D) in which storage is the limit (paper 4.2, equation 9) as a figure.

Nothing is written here: the caller saves the figure. It is drawn on Matplotlib's own canvas, so no display is needed.
"""

from __future__ import annotations

from fractions import Fraction

from matplotlib.figure import Figure

from testbed.analysis.bottleneck import (
    Resource,
    Setting,
    de_cnic_read_bound,
    de_cnic_write_bound,
    de_dram_bound,
    lower_bound,
)

_STEPS = 400
_SMALLEST_PD, _LARGEST_PD = 0.05, 20.0
_LARGEST_SHARE = Fraction(1, 2)  # equation 1


def region_figure(at: Setting, pd: Fraction) -> Figure:
    """Bounds over s/g from 0 to 1/2 at the M/B of ``at``, the region inside them, and the point (s/g, pd)."""
    shares = [_LARGEST_SHARE * i / _STEPS for i in range(1, _STEPS)]
    memory_over_cnic = at.memory_ratio * at.s  # M/B stays while s changes
    at_share = [
        Setting(gpus=at.gpus, s=share * at.gpus, memory_ratio=memory_over_cnic / (share * at.gpus)) for share in shares
    ]
    x = [float(share) for share in shares]
    lower = [float(lower_bound(each) or 0) for each in at_share]
    uppers = {
        Resource.DE_CNIC_READ: [float(de_cnic_read_bound(each)) for each in at_share],
        Resource.DE_CNIC_WRITE: [float(de_cnic_write_bound(each)) for each in at_share],
        Resource.DE_DRAM: [float(de_dram_bound(each)) for each in at_share],
    }
    upper = [min(bounds) for bounds in zip(*uppers.values(), strict=True)]

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.fill_between(
        x, lower, upper, where=[a <= b for a, b in zip(lower, upper, strict=True)], alpha=0.2, label="storage-bound"
    )
    axes.plot(x, lower, label=f"{Resource.PE_CNIC_WRITE.value} (eq. 3)")
    for equation, (resource, bounds) in zip((5, 7, 8), uppers.items(), strict=True):
        axes.plot(x, [b if b > 0 else float("nan") for b in bounds], label=f"{resource.value} (eq. {equation})")
    axes.plot([float(at.share)], [float(pd)], "k*", markersize=12, label=f"s/g = {at.share}, P/D = {pd}")
    axes.set_yscale("log")
    axes.set_ylim(_SMALLEST_PD, _LARGEST_PD)
    axes.set_xlim(0, float(_LARGEST_SHARE))
    axes.set_xlabel("s/g: storage over compute bandwidth of a node")
    axes.set_ylabel("P/D")
    axes.set_title(f"Where storage is the limit, g = {at.gpus}, M/B = {float(memory_over_cnic):g}")
    axes.legend(fontsize="small")
    return figure
