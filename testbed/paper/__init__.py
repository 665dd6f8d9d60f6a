"""The paper's evaluation as commands: what it measured, what the simulation gives, and the difference (section 7)."""
