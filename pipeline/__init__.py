"""The part of Stageline that runs the stages: it orders them, chooses their workers, and bounds the staleness of their
data. Contents: config, graph, driver, workers, plan, tracking and command line. Imports stages and storage."""
