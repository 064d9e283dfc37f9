"""The Reward protocol, and the rewards that a config can name."""
