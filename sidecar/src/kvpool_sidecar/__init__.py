"""KVPool sidecar: one node's blocks, served to its pods and its peers."""
