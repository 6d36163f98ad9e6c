"""Discrete-event simulation of a pool over a trace, with the eviction tables and choices of the sidecar.

`settings` describes the pool, `workload` makes requests of a trace, `node` is one node, `routers` choose nodes, and
`pool` runs the events. It needs the package of the sidecar; `settings` alone does not.
"""
