"""Models of the paper's world: LLMs, GPUs, node hardware, and the scales that map them onto the emulated cluster."""
