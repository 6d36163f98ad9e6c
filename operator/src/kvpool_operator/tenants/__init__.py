"""Resolution of KVCacheTenants. Pure."""
