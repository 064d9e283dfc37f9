"""The journal of a run and what is made from it: history, summary, plots, report, live display and tracking."""
