"""The node agent: creates a listening socket in each engine pod's volume for the sidecar of the pod's pool.

It serves all pools of a node, in a pod of its own in the release's namespace. It is root and can see the volumes of
other pods, so it does nothing else: no blocks, no network except the API server, no capability.
"""
