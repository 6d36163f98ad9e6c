"""Wire protocols, block file format, identities, and names that operator, sidecar and client share."""
