"""The process that drives a run: the run itself, the executor, and the cluster of workers."""
