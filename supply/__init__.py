"""What KVPool's images are made of: bills of materials, and what is known to be wrong with their parts."""
