"""Block bytes between nodes."""
