"""Every experiment that ships has a page that says what was expected, a figure, and a line in the index."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import pytest

from scenarios.loader import experiment_names
from testbed.analysis.bottleneck import Resource, binding, pd_ratio, setting, storage_share
from testbed.experiment.file import read_experiment
from testbed.models.hardware import PAPER_HARDWARE

DOCS = Path(__file__).parents[2] / "docs"
SECTIONS = ("Question", "Set-up", "Figure", "Answer", "For someone about to buy hardware")


def words(text: str) -> str:
    """The text without line breaks and marks."""
    return " ".join(re.sub(r"[*`]", "", text).split())


@pytest.mark.parametrize("name", experiment_names())
def test_an_experiment_has_a_page(name: str) -> None:
    page = (DOCS / "experiments" / f"{name}.md").read_text(encoding="utf-8")
    experiment = read_experiment(name)
    assert re.findall(r"^## (.*)$", page, re.MULTILINE) == list(SECTIONS)
    for claim in experiment.claims:
        assert words(claim.text) in words(page), f"{claim.name}: {claim.text}"
    assert words(experiment.question) in words(page)
    for file in re.findall(r"\]\(([\w.-]+\.svg)\)", page):
        assert (DOCS / "experiments" / file).is_file(), file


def test_pd_bounds_expects_what_the_analysis_names() -> None:
    names = {
        Resource.SNIC: "snic",
        Resource.PE_CNIC_WRITE: "pe_cnic_write",
        Resource.DE_CNIC_WRITE: "de_cnic_write",
    }
    experiment = read_experiment("pd-bounds")
    claims = {claim.name: claim.claim for claim in experiment.claims}
    for variant in experiment.variants:
        s = dict(variant.settings)
        shape = {key: int(s[f"cluster.{key}"]) for key in ("prefill_nodes", "decode_nodes", "gpus_per_node")}
        at = setting(
            gpus=shape["gpus_per_node"],
            s=Fraction(s["cluster.s"]),
            cnic_bytes_per_s=Fraction(PAPER_HARDWARE.cnic_rate_bps, 8),
            memory_bytes_per_s=Fraction(PAPER_HARDWARE.dram_rate_bps, 8),
        )
        pd = pd_ratio(shape["prefill_nodes"], shape["decode_nodes"])
        (named,) = binding(at, pd)
        prefix = f"{variant.name.replace('-', '_')}.dualpath"
        assert claims[variant.name].startswith(f"{prefix}.uses.{names[named]} > max(")
        left = re.search(rf"{prefix}.snic_plateau_mean - ([\d.]+)", claims["storage"])
        assert left is not None and float(left[1]) == pytest.approx(float(storage_share(at, pd)), abs=0.001)


def test_the_index_names_every_experiment() -> None:
    index = (DOCS / "experiments.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| \[(.*?)\]\(experiments/\1\.md\) \|", index, re.MULTILINE) == experiment_names()
