"""The operations of a forward pass: the protocol, a reference in plain torch, C for CPUs, Triton for CUDA."""
