"""Reconciles KVCacheOperations: requests to the nodes of a pool in steps, and their results."""
