"""The kernels in Triton, and batches captured as CUDA graphs. Both were tested on an H200."""
