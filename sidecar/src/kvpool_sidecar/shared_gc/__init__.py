"""Shared gc."""
