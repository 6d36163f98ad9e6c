"""Public import path of the LMCache remote connector: `kvpool.engines.lmcache_remote:PoolConnectorAdapter`."""

from kvpool.engines.lmcache.remote_connector import PoolConnector, PoolConnectorAdapter

__all__ = ["PoolConnector", "PoolConnectorAdapter"]
