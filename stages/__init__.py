"""The computation: one file per kind of PPO stage, and the models, engines, rewards and maths that the stages use.
Imports storage."""
