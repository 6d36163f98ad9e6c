"""The API: models of kvpool.dev/v1alpha1, the CRD made from them, conditions. Imports nothing else of the operator."""
