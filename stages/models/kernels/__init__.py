"""What lies between the matrix products of a transformer block while it is trained: norms, the MLP's gate, heads taken
apart and turned, sums. `protocol` says what, `composed` is plain torch, `native` is C on a CPU."""
