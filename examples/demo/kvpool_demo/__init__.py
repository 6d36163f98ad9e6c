"""`make demo`: sessions that move between three nodes on one machine, with a real engine, with and without the pool."""
