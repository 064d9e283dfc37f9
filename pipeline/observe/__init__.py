"""The journal of a run, and the run's outputs for users: history, summary, plots, report, live display and tracking."""
