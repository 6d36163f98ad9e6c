"""Small root container of the sidecar's pod: creates a listening socket in each engine pod's volume for the server.

Uses the standard library and kvpool_sidecar.system only. It can see other pods' volumes, so it does nothing else: no
blocks, no network except the API server, no capability.
"""
