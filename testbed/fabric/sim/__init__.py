"""The sim world: the same machines in virtual time, sizes instead of bytes, fluid flows over the live world's links."""
