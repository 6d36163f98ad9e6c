"""Resilience."""
