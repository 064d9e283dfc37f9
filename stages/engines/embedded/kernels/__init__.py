"""What a forward pass is made of: the protocol, a reference in plain torch, C for CPUs, Triton for CUDA."""
