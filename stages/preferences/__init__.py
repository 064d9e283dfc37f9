"""Reward models learnt from judgements or from teachers: data, losses, measures, training loop."""
