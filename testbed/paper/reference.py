"""What the paper reports, as data (arXiv 2602.21548 v2, sections 7 and 8; figures digitised to 1-2 % of an axis).

Nothing here is ours. Times are seconds, systems carry the keys of ``testbed.protocol.params`` plus ``sgl-mc``; None
stands for a cell that the paper leaves out. Table 1 is in ``testbed.analysis.ratio``.

Invariant: every series is as long as the axis named beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

Series = tuple[float | None, ...]

FIGURE_7_AGENTS = (512, 1024, 2048, 4096)

FIGURE_7: Mapping[tuple[str, str], Mapping[str, Series]] = MappingProxyType(
    {
        ("ds-27b", "32K"): {
            "oracle": (380, 460, 730, 1310),
            "dualpath": (420, 680, 1120, 2120),
            "basic": (520, 1000, 1870, 3560),
        },
        ("ds-27b", "48K"): {
            "oracle": (610, 750, 1240, 3130),
            "dualpath": (770, 1340, 2260, 4810),
            "basic": (1220, 2160, 4030, 7280),
        },
        ("ds-27b", "64K"): {
            "oracle": (850, 1440, 2380, 5220),
            "dualpath": (1280, 2380, 4470, 9430),
            "basic": (2190, 4110, 7850, 16710),
        },
        ("ds-660b", "32K"): {
            "oracle": (870, 1100, 1680, 3010),
            "dualpath": (870, 1100, 1640, 2880),
            "basic": (970, 1520, 2540, 4690),
            "sgl-mc": (2740, 4810, 14740, None),
        },
        ("ds-660b", "48K"): {
            "oracle": (1410, 1750, 3010, 5610),
            "dualpath": (1410, 1840, 3140, 5910),
            "basic": (1800, 3050, 5480, 10370),
            "sgl-mc": (4610, 8590, 20910, None),
        },
        ("ds-660b", "64K"): {
            "oracle": (1950, 2680, 4920, 9350),
            "dualpath": (2060, 2940, 5390, 10340),
            "basic": (2890, 5390, 10080, 19280),
            "sgl-mc": (6740, 12470, None, None),
        },
    }
)
"""Figure 7: offline JCT by (model, trace) and system over ``FIGURE_7_AGENTS``; of Qwen 32B no values are known."""

FIGURE_7_NOISE = 0.05
"""Two systems closer than this are a tie: Oracle is up to 4.5 % behind DualPath on 660B 32K, which it cannot be."""

FIGURE_8_AGENTS = (512, 1024, 2048)

FIGURE_8: Mapping[tuple[str, int, int], Series] = MappingProxyType(
    {
        ("dualpath", 1, 1): (1285, 2410, 4470),
        ("basic", 1, 1): (2220, 4110, 7870),
        ("dualpath", 2, 1): (1048, 1831, 3270),
        ("basic", 2, 1): (1300, 2402, 4200),
        ("dualpath", 1, 2): (1026, 1835, 3390),
        ("basic", 1, 2): (2175, 4490, 8280),
    }
)
"""Figure 8: 27B, 64K, JCT by (system, prefill nodes, decode nodes) over ``FIGURE_8_AGENTS``."""

FIGURE_8_EQUAL_SNICS = (
    (1, ("basic", 1, 1), ("basic", 1, 2)),
    (2, ("dualpath", 1, 1), ("basic", 2, 1)),
    (3, ("dualpath", 2, 1), ("dualpath", 1, 2)),
)
"""Figure 8: settings that read through equally many SNICs, with their number; the paper finds their JCT equal."""

FIGURE_8_MEAN_GAIN, FIGURE_8_MAX_GAIN = 1.64, 2.46
"""Section 7.3: mean and largest speed-up of the P/D sweep. The mean is over all traces: 64K alone gives 1.78."""

FIGURE_9_APPEND_GAIN = (1.82, 1.99)
"""Figure 9 (660B, 64K, 1,024 agents): smallest and largest gain over the append scales. The scales are UNKNOWN."""

FIGURE_10_APS = (0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5)

FIGURE_10: Mapping[str, Mapping[str, Series]] = MappingProxyType(
    {
        "TTFT": {
            "dualpath": (0.78, 0.88, 1.08, 1.15, 1.30, 1.6, 1.74, 2.82, None),
            "oracle": (0.68, 0.79, 1.04, 1.28, 1.30, 1.62, 1.77, 2.09, 3.44),
            "basic": (0.85, 0.98, 1.48, None, None, None, None, None, None),
        },
        "TTST": {
            "dualpath": (0.166, 0.168, 0.175, 0.186, 0.190, 0.212, 0.230, 0.707, None),
            "oracle": (0.096, 0.097, 0.102, 0.106, 0.106, 0.115, 0.122, 0.218, 0.489),
            "basic": (0.204, 0.206, 0.216, None, None, None, None, None, None),
        },
        "TPOT": {
            "dualpath": (0.0308, 0.0315, 0.0327, 0.0337, 0.0341, 0.0370, 0.0391, 0.0493, None),
            "oracle": (0.0291, 0.0301, 0.0311, 0.0320, 0.0325, 0.0344, 0.0356, 0.0389, 0.0426),
        },
    }
)
"""Figure 10: 660B online, means in seconds over ``FIGURE_10_APS``. TTFT is read by eye where markers overlap."""

FIGURE_10_SGL_APS = (0.01, 0.06)

FIGURE_10_SGL: Mapping[str, Series] = MappingProxyType(
    {"TTFT": (0.54, 1.3), "TTST": (0.04, 0.06), "TPOT": (0.041, 0.047)}
)
"""Figure 10: SGL(MC) at the two ends of its range; that TTST and TPOT rise along it is assumed."""

CAPACITY_APS: Mapping[tuple[str, str], float] = MappingProxyType(
    {("ds-660b", "basic"): 0.2, ("ds-660b", "dualpath"): 0.45, ("ds-660b", "oracle"): 0.5,
     ("ds-27b", "basic"): 0.3, ("ds-27b", "dualpath"): 0.5}
)  # fmt: skip
"""Figure 10: largest APS within the SLO."""

CAPACITY_GAIN: Mapping[str, float] = MappingProxyType({"ds-660b": 2.25, "ds-27b": 1.67})
"""Section 7.4: capacity of DualPath over Basic; 1.96 of the abstract is the mean of the two."""

LOW_LOAD_JOB_S: Mapping[str, float] = MappingProxyType({"ds-660b": 569.0, "ds-27b": 290.0})
"""Section 7.4: time of one agent's whole job online at low load."""

WORKING_SET_GB: Mapping[float, float] = MappingProxyType({0.1: 69.0, 0.45: 681.0})
"""Section 8.2: KV of the agents in the system by APS, 660B. Bytes per token are not stated there."""

TTFT_PARTS = ("Sch", "Alloc", "Read", "Prefill")

FIGURE_12_LEFT: Mapping[tuple[str, float], tuple[float, float, float, float]] = MappingProxyType(
    {
        ("dualpath", 0.15): (22, 8, 31, 39),
        ("basic", 0.15): (21, 0, 47, 32),
        ("dualpath", 0.2): (22, 7, 32, 40),
        ("basic", 0.2): (40, 0, 37, 23),
        ("dualpath", 0.25): (22, 6, 32, 40),
        ("basic", 0.25): (72, 0, 17, 11),
    }
)
"""Figure 12 left: parts of the TTFT in percent (``TTFT_PARTS``) by (system, APS), 660B."""

FIGURE_12_AGENTS = (1024, 2048)

FIGURE_12_RIGHT: Mapping[str, Series] = MappingProxyType(
    {"basic": (5423, 10124), "layerwise": (4268, 8804), "dual-path-rr": (3196, 6536), "dualpath": (2990, 5464)}
)
"""Figure 12 right: ablation, 660B 64K, JCT over ``FIGURE_12_AGENTS``; every system adds one technique to the last."""

MEAN_CUT_PERCENT: Mapping[str, float] = MappingProxyType({"layerwise": 17.21, "dual-path-rr": 38.19, "dualpath": 45.62})
"""Section 7.5: mean cut of JCT against Basic."""

FIGURE_13: Mapping[str, tuple[float, float, float]] = MappingProxyType(
    {"dual-path-rr": (1.528, 1.33, 1.80), "dualpath": (1.184, 1.07, 1.32)}
)
"""Figure 13: SNIC max/avg over windows: mean, smallest, largest. 48K, 1,024 trajectories, three machines."""

FIGURE_14_EARLY = 1.06
"""Figure 14: attention time max/avg within an EP group in the first 5 % of the task, with the compute quota."""

TABLE_3_OFFLINE_JCT_S: Mapping[tuple[int, int, int], float] = MappingProxyType(
    {(2, 4, 2048): 3167, (48, 96, 49_152): 3201}
)
"""Table 3 offline by (prefill nodes, decode nodes, agents): 2K and 48K agents."""

TABLE_3_ONLINE: Mapping[tuple[int, int, float], tuple[float, float, float]] = MappingProxyType(
    {(2, 4, 0.4): (1.739, 0.228, 0.039), (44, 88, 8.8): (1.847, 0.194, 0.036)}
)
"""Table 3 online by (prefill nodes, decode nodes, APS): TTFT, TTST, TPOT in seconds."""

FIGURE_15_PROMPT_TPS: Mapping[float, float] = MappingProxyType({900.0: 6.2e7, 1600.0: 6.2e7, 2400.0: 6.2e7})
FIGURE_15_TTFT_S: Mapping[float, float] = MappingProxyType(
    {0.0: 13.0, 200.0: 27.7, 800.0: 11.0, 1400.0: 14.0, 2600.0: 2.0}
)
FIGURE_15_AGENTS: Mapping[float, float] = MappingProxyType(
    {0.0: 48_700.0, 1000.0: 41_000.0, 2000.0: 27_500.0, 2800.0: 2_400.0}
)
"""Figure 15 (48P96D) by second: prompt tokens/s (flat from 900 to 2,400), TTFT (2 at 2,600 is a bound), agents left."""
