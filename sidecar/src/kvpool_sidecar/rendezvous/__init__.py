"""The small root part of the sidecar's pod: puts a listening socket into each engine pod's volume for the server.

Standard library only, and of ours only what opens files and sockets safely. It can see other pods' volumes, so it does
nothing else: no blocks, no network but the API server, no capability.
"""
