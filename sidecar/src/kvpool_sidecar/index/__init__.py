"""The prefix index: which node has a block. A hint; nothing depends on it for correctness."""
