"""KV content: what the bytes of a block are, an emulated GPU that makes them, and the reference that checks the tokens."""
