"""What can be computed about DualPath without running anything."""
