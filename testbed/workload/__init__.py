"""Workloads: agent trajectories, where they come from, and how they are replayed (paper sections 7.2, A.3, A.4)."""
