"""Cluster descriptions by name: TOML files and the loader that turns them into a ``ClusterSpec``."""
