"""DualPath testbed: one transfer protocol, emulated live on Linux namespaces with real KV bytes."""

__version__ = "0.1.0"
