"""KVPool operator: observe -> desired -> plan -> apply -> status."""
