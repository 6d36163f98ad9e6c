"""KVPool client: zero dependencies, imports on Python 3.10 to 3.13, never raises into an engine."""
