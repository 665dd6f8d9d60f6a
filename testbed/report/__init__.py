"""What a run leaves for people and tools: the run folder, ``metrics.json``, the table at the end."""
