"""The frequency of this processor's time stamp counter, for a guest that would otherwise have to guess it.

QEMU's software emulation hands the host's counter through. A kernel measures it against emulated timers while it boots;
on a busy host that goes wrong, by a factor of four at times, and with it every rate and timeout in the guest.
"""

from __future__ import annotations

import ctypes
import mmap
import time

_RDTSC = bytes.fromhex("0f31 48c1e220 4809d0 c3")  # rdtsc; shl rdx, 32; or rax, rdx; ret
_MEASURED_S = 0.2


def tsc_khz() -> int | None:
    """Counts per millisecond; None where the host forbids code in memory that can be written."""
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:
        return None
    page.write(_RDTSC)
    code = ctypes.c_char.from_buffer(page)
    read = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(code))
    begin, begin_ns = read(), time.perf_counter_ns()
    time.sleep(_MEASURED_S)
    end, end_ns = read(), time.perf_counter_ns()
    counted: int = end - begin
    return round(counted * 1_000_000 / (end_ns - begin_ns))
