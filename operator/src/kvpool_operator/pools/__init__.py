"""Reconciles KVCachePools."""
