"""The process that drives a run: the run, the executor, the cluster of workers. Imports workers and below."""
