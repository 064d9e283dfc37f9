"""In which order, where, how stale: config, graph, executor, tracking, command line. Imports stages and storage."""
