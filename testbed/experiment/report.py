"""What an experiment leaves: ``experiment.json``, ``experiment.csv``, and the table at its end."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from testbed.errors import HostError
from testbed.experiment.judge import Outcome, RunEnd
from testbed.experiment.plot import value_of
from testbed.metrics.summary import finite

DOCUMENT, TABLE = "experiment.json", "experiment.csv"
_COLUMNS = ("world", "variant", "system", "metric", "value")


def write(folder: Path, outcome: Outcome, runs: Sequence[RunEnd]) -> None:
    """Write the document and the tidy table (medians of repeats).

    Raises:
        HostError: the disk is full or read-only.
    """
    rows = [
        (world, variant, *key.split(".", 1), value)
        for world, by_variant in outcome.measured.items()
        for variant, values in by_variant.items()
        for key, value in values.items()
    ]
    try:
        text = json.dumps(_document(outcome, runs), indent=2, allow_nan=False)
        (folder / DOCUMENT).write_text(text + "\n", encoding="utf-8")
        with (folder / TABLE).open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(_COLUMNS)
            writer.writerows(rows)
    except OSError as error:
        raise HostError(f"{folder}: cannot be written to ({error.strerror}).") from error


def _document(outcome: Outcome, runs: Sequence[RunEnd]) -> dict[str, Any]:
    e = outcome.experiment
    return {
        "experiment": e.name,
        "title": e.title,
        "question": e.question,
        "verdict": outcome.verdict,
        "exit_code": outcome.exit_code,
        "variants": [asdict(variant) for variant in e.variants],
        "runs": [
            {
                "world": r.world,
                "variant": r.variant,
                "folder": r.folder,
                "valid": bool(r.document and r.document["valid"]),
            }
            for r in runs
        ],
        "expectations": [asdict(j) for j in outcome.judged],
        "agreement": [
            {
                "value": a.value,
                "live": finite(a.live),
                "sim": finite(a.sim),
                "error": finite(a.error),
                "tolerance": a.tolerance,
                "agrees": a.agrees,
            }
            for a in outcome.agreements
        ],
        "unsupported": [asdict(u) for u in outcome.unsupported],
        "failures": list(outcome.failures),
        "invalid_reasons": list(outcome.troubles),
    }


def print_outcome(console: Console, outcome: Outcome) -> None:
    """Print figures, expectations, agreement and verdict."""
    console.print(outcome.experiment.question, soft_wrap=True, markup=False)
    if outcome.experiment.figures:
        console.print(_figures(outcome))
    for j in outcome.judged:
        state = "TRUE " if j.holds else "FALSE"
        console.print(f"{state} {j.world:4} {j.name}: {j.text}", soft_wrap=True, markup=False)
        console.print(f"           {j.claim}: {j.numbers}", soft_wrap=True, markup=False)
    for a in outcome.agreements:
        if not a.agrees:
            off = f"{a.error:+.1%}, more than {a.tolerance:.0%}"
            console.print(f"APART      {a.value}: live {a.live:.4g}, sim {a.sim:.4g}, {off}", soft_wrap=True)
    for unsupported in outcome.unsupported:
        console.print(str(unsupported), soft_wrap=True, markup=False)
    for failure in outcome.failures:
        console.print(f"FAILED: {failure}", soft_wrap=True, markup=False)
    for trouble in outcome.troubles:
        console.print(f"INVALID: {trouble}", soft_wrap=True, markup=False)
    console.print(outcome.verdict, soft_wrap=True)


def _figures(outcome: Outcome) -> Table:
    """A row per figure and variant, live beside sim."""
    e = outcome.experiment
    table = Table()
    table.add_column("")
    table.add_column("variant")
    for world in outcome.measured:
        table.add_column(world, justify="right")
    both = len(outcome.measured) > 1
    if both:
        table.add_column("error", justify="right")
    for figure in e.figures:
        title = f"{figure.panel}: {figure.label}" if figure.panel else figure.label
        for variant in e.variants:
            cells = [value_of(figure, by_variant.get(variant.name, {})) for by_variant in outcome.measured.values()]
            if all(cell is None for cell in cells):
                continue
            shown = ["" if cell is None else f"{cell:.4g}" for cell in cells]
            if both:
                live, sim = (
                    value_of(figure, outcome.measured[world].get(variant.name, {})) for world in ("live", "sim")
                )
                shown.append(f"{sim / live - 1:+.1%}" if live and sim is not None else "")
            table.add_row(escape(title), variant.name, *shown)
            title = ""
        table.add_section()
    return table
