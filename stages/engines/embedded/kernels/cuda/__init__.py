"""The kernels in Triton, and batches captured as CUDA graphs. Never run on a GPU yet."""
