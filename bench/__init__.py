"""Measurements of the data path against what the machine itself can do. Run: make bench."""
