"""The figures and tables that ``testbed paper`` knows, in the paper's order."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from testbed.paper.figures.ablation import FIG12, FIG13, FIG14
from testbed.paper.figures.figure import Figure
from testbed.paper.figures.offline import FIG7, FIG8, FIG9
from testbed.paper.figures.scale import FIG15, TABLE3
from testbed.paper.figures.serving import FIG10, FIG11
from testbed.paper.figures.table1 import TABLE1
from testbed.paper.figures.tools import TOOLS

FIGURES: Mapping[str, Figure] = MappingProxyType(
    {f.name: f for f in (TABLE1, FIG7, FIG8, FIG9, FIG10, FIG11, FIG12, FIG13, FIG14, TABLE3, FIG15, TOOLS)}
)
