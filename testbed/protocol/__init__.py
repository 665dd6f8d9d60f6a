"""The transfer protocol, pure: layout, index, grants, messages, machines' vocabulary, scheduling. No I/O, no clock."""
