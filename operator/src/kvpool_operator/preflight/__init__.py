"""Preflight checks: results of the nodes, and the decision about a rollout. Pure."""
