"""The status page of pools: a view model, a reader of the cluster, and a server on loopback."""
