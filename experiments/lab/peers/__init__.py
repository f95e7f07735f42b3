"""Other systems that serve the same workload, timed with the same definitions."""
