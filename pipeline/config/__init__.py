"""The configuration of a run: schema, loading, checks, preflight, paths. Imports graph, stages and storage."""
