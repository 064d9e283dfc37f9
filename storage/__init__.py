"""Everything that a run writes down: records, rollouts, commits, weights, prompts. Imports numpy, but no torch and no
Dask."""
