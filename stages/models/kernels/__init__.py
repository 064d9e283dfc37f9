"""A trained transformer block's operations between its matrix products: norms, the MLP's gate, splitting and rotating
heads, sums. `protocol` defines them, `torch_kernels` is plain torch, `native` is C on a CPU."""
