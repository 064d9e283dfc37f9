"""The order in which stages run, the workers that run them, and the staleness of their data: config, graph, executor,
tracking and command line. Imports stages and storage."""
