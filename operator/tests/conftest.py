"""Puts this folder on sys.path, for the helper modules in it."""
