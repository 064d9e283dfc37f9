"""The mathematics of PPO as pure functions: masks, KL, rewards, GAE, losses, packing, metrics."""
