"""The configuration of a run: one file per section, the run as a whole, loading, preflight, paths.

Imports graph, stages and storage.
"""
