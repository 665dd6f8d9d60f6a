"""What to run: topology, model, workload, scale and systems to compare, with what is expected of them."""
