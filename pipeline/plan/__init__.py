"""Predict what a run costs, before it runs: lengths, seconds of each node, calibration, simulation, search."""
