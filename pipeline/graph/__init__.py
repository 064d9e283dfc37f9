"""The graph of a run and what decides on it: pure, no clock, no Dask. Imports stages' and storage's plain types."""
