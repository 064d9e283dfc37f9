"""Submission of runs to Slurm: the job's shape, its script, Slurm's commands, and requeues."""
