"""KV events of this node's blocks, under their engines' hashes, for routers (docs/reference/kv-events.md)."""
