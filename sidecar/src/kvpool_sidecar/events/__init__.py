"""KV events: what this node's blocks are called in their engines, told to routers (docs/reference/kv-events.md)."""
