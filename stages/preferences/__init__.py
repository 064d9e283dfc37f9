"""Reward models learnt from human judgements: data, losses, measures, the training loop."""
