"""Benchmarks of other projects over the pool: their code is handed in by path, adapters and ratios are here."""
