"""What a person is told of an exception: one sentence; where it came from only when asked for (TESTBED_DEBUG=1)."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

from testbed.errors import RunFailedError, TestbedError

INTERRUPTED = 130


def explained(error: BaseException) -> tuple[str, int]:
    """The sentence and the exit code for an exception that is being handled."""
    if os.environ.get("TESTBED_DEBUG") == "1":
        traceback.print_exc()
    if isinstance(error, TestbedError):
        return sentence_for(error), error.exit_code
    return sentence_for(error), INTERRUPTED if _interrupted(error) else RunFailedError.exit_code


def code_of_run(run: Callable[[], int]) -> int:
    """The exit code of a run in a process of its own; what it complains of is in its output."""
    try:
        return run()
    except (Exception, KeyboardInterrupt) as error:
        sentence, code = explained(error)
        sys.stderr.write(f"error: {sentence}\n")
        return code


def sentence_for(error: BaseException) -> str:
    """One sentence."""
    if isinstance(error, TestbedError):
        return str(error)
    if _interrupted(error):
        return "interrupted"
    return " ".join(f"internal error: {type(error).__name__}: {error} (TESTBED_DEBUG=1 shows where)".split())


def _interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind it: code that is interrupted often fails in its clean-up, and that is what arrives."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False
