"""What is written down: records, rollouts, commits, weights, prompts. Imports numpy and no torch, no Dask."""
