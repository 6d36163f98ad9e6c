"""Sizes of pools: pure functions from a model's config.json and a workload to bytes, rates and verdicts."""
