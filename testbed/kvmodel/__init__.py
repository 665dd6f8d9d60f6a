"""KV content: the bytes of a block, an emulated GPU that makes them, and the reference that checks the tokens."""
