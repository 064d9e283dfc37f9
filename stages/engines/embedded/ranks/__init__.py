"""A model that spans several processes: tensor and pipeline parallelism."""
