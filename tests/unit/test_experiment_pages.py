"""Every experiment that ships has a page that says what was expected, a figure, and a line in the index."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scenarios.loader import experiment_names
from testbed.experiment.file import read_experiment

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


def test_the_index_names_every_experiment() -> None:
    index = (DOCS / "experiments.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| \[(.*?)\]\(experiments/\1\.md\) \|", index, re.MULTILINE) == experiment_names()
