"""The base class `Reward`, and the rewards that a config can name."""
