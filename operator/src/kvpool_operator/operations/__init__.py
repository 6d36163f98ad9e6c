"""KVCacheOperations: what each asks of a pool's nodes, in which order, and what came of it."""
