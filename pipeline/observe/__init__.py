"""What a run tells: journal, history, summary, plots, live display, tracking. Imports graph, stages and storage."""
