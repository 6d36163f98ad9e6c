"""Clients of the sidecars' HTTP APIs: status and admin operations."""
