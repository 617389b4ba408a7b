"""What the attention operations share: argument checks, rules for derivatives, vmap and sharding, pieces of kernels."""
