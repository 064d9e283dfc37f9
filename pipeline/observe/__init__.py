"""What a run reports: journal, history, summary, plots, live display, tracking. Imports graph, stages and storage."""
