"""``make test-kernel``: the live tests marked ``stock_kernel`` under Debian's own kernel, in QEMU, without root."""
