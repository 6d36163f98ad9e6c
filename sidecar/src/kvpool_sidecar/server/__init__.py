"""Answers the clients of this node: who is calling, what they may have, from where."""
