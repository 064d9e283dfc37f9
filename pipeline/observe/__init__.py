"""What a run reports: journal, history, summary, plots, report, live display, tracking. Imports graph, stages and
storage."""
