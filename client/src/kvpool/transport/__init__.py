"""Connections to the sidecar, and transfers of blocks between descriptors or peer streams and buffers."""
