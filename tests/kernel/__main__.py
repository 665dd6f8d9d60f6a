"""``python -m tests.kernel [--limit SECONDS] [PYTEST ARGUMENTS]``: the tests marked stock_kernel in a QEMU guest.

Exit code: pytest's; 2 if this host cannot run it (pytest's own 2, an interruption of its collection, becomes 1).
"""

from __future__ import annotations

import argparse
import compileall
import errno
import os
import signal
import sys
import time
from pathlib import Path

from testbed.errors import HostError, TestbedError
from tests.kernel import guest, packages

MARKER = "stock_kernel"
LIMIT_S = 1500.0
CHECKOUT = Path(__file__).parents[2]


def marked_files() -> list[str]:
    """Test files that speak of the marker: importing all others would take the slow guest minutes."""
    files = sorted((CHECKOUT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(CHECKOUT)) for path in files if MARKER in path.read_text()]


def run(limit_s: float, pytest_arguments: list[str]) -> int:
    """Fetch, boot; pytest's exit code."""
    root = packages.ensure(CHECKOUT / ".cache" / "kernel")
    for folder in ("testbed", "emulators", "topologies", "scenarios", "tests"):
        compileall.compile_dir(CHECKOUT / folder, quiet=2)  # sixteen times slower inside
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.kernel.disciplines", "-m", MARKER]
    named = any((CHECKOUT / word.split("::")[0]).exists() for word in pytest_arguments)
    command += [*([] if named else marked_files()), *pytest_arguments]
    environment = {"PYTHONPATH": str(CHECKOUT), "PATH": os.environ["PATH"]}
    return guest.run(root, CHECKOUT, command, environment, limit_s)


def main() -> int:
    """Run, report."""
    parser = argparse.ArgumentParser(prog="python -m tests.kernel", description=__doc__)
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="end the guest after this long")
    options, pytest_arguments = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # unwinds, so that no QEMU stays behind
    started = time.monotonic()
    try:
        code = run(options.limit, pytest_arguments)
    except TestbedError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ENOMEM):
            raise
        print(f"error: {error.filename or 'a file'}: {error.strerror}; mend that and try again.", file=sys.stderr)
        return HostError.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    print(f"stock kernel: pytest ended with {code}, {time.monotonic() - started:.0f} s in all")
    load, processors = os.getloadavg()[0], os.cpu_count() or 1
    if code and load > processors + guest.PROCESSORS:
        print(f"this host is busy (load {load:.0f} on {processors} processors): rates in the guest may have suffered")
    return 1 if code == 2 else code


if __name__ == "__main__":
    sys.exit(main())
