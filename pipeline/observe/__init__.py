"""The journal of a run, and its outputs for users: history, summary, plots, report, live display and tracking."""
