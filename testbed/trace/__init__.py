"""The trace: one file per role, one line per event and action, the same in every world."""
