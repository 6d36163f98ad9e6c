"""Observe."""
