"""Parts of the KVCachePool API: one module for each section of the spec, and the status."""
