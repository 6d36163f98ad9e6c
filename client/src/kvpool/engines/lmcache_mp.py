"""Public import path of the L2 adapter for LMCache's server: `kvpool.engines.lmcache_mp:PoolL2Adapter`."""

from kvpool.engines.lmcache.l2_adapter import PoolL2Adapter

__all__ = ["PoolL2Adapter"]
