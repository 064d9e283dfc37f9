"""The kernels as C, compiled on the machine they run on."""
