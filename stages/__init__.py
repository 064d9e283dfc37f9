"""What is computed: one file per PPO stage, and the models, engines, rewards and maths they use. Imports storage."""
