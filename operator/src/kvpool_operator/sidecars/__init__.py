"""Sidecars."""
