"""Codes of findings and their words. Pure data."""
