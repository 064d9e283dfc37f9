"""How a run comes onto a cluster: what it asks Slurm for, the script, and what becomes of it."""
