"""`make soak`: the reference mix for minutes while things break at random, and nothing promised may break."""
