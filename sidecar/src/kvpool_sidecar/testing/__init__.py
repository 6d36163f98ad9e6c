"""Contracts as tests, for whoever writes a Store or an Index. Needs pytest; nothing else in the package does."""
