"""The check world: the same machines without time, every order of events, and a few faults."""
