"""The kernels in Triton, and batches captured as CUDA graphs. Neither has run on a GPU yet."""
