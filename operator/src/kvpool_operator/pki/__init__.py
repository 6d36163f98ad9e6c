"""Certificates of the webhook, and the CA of the sidecars. Pure: every function takes the time."""
