"""What users would take in the pool's place, measured by its own code: see `docs/project/benchmarks.md`."""
