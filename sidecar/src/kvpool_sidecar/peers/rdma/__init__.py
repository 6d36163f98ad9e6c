"""Reads from peers by remote DMA: NIXL (UCX) moves a block from the peer's memory into ours, no processor on the way.

The serving sidecar stages a block in registered memory (`staging`), the asking one reads it into a slot (`slots`) whose
descriptor its client gets (`fetch`). Control stays on the proven peer connection. Only `agent` knows NIXL.
"""
