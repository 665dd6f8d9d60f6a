"""Experiments: variants of a scenario in one or two worlds, what is expected of them, and what became of it."""
