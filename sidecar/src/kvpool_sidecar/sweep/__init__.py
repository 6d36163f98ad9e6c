"""Housekeeping of a shared directory: one sidecar of the pool sweeps it, whichever holds the lease. No index needed."""
