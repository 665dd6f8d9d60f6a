"""What a person is told of an exception: one sentence; where it came from only when asked for (TESTBED_DEBUG=1)."""

from __future__ import annotations

import os
import traceback

from testbed.errors import RunFailedError, TestbedError

INTERRUPTED = 130


def explained(error: BaseException) -> tuple[str, int]:
    """The sentence and the exit code for an exception that is being handled."""
    if os.environ.get("TESTBED_DEBUG") == "1":
        traceback.print_exc()
    if isinstance(error, TestbedError):
        return str(error), error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED
    sentence = f"internal error: {type(error).__name__}: {error} (TESTBED_DEBUG=1 shows where)"
    return " ".join(sentence.split()), RunFailedError.exit_code
