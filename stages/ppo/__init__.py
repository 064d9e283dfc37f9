"""The mathematics of PPO as pure functions: masks, KL, rewards, GAE, losses, micro-batches, metrics."""
