"""What commands know about a cluster: documents that kubectl reads, and the view of a pool that is made from them."""
