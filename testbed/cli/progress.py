"""Progress of a run on stderr: a bar on a terminal, one plain line per stage elsewhere, nothing when quiet.

No thread refreshes the bar: roles are forked from this process, and a fork in the middle of a thread's work is a trap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

Report = Callable[[str, float], None]


@contextmanager
def reporting(console: Console, *, quiet: bool) -> Iterator[Report]:
    """A function to call with the stage and how much of it is done (0 to 1)."""
    if quiet:
        yield lambda stage, share: None
    elif not console.is_terminal:
        yield _plain(console)
    else:
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, auto_refresh=False) as progress:
            task = progress.add_task("", total=1.0)
            latest = ""

            def report(stage: str, share: float) -> None:
                nonlocal latest
                if stage != latest:
                    if latest:
                        progress.update(task, completed=1.0)
                    latest = stage
                    progress.reset(task, description=stage)
                progress.update(task, completed=share)
                progress.refresh()

            yield report


def _plain(console: Console) -> Report:
    latest = ""

    def report(stage: str, share: float) -> None:
        nonlocal latest
        if stage != latest:
            latest = stage
            console.print(stage, highlight=False)

    return report
