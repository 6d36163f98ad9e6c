"""LMCache plug-ins: the L2 adapter of its server, and the remote connector inside an engine."""
