"""The kernels in Triton, and passes captured as CUDA graphs. Never run on a GPU yet."""
