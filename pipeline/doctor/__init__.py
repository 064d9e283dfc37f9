"""`stageline doctor`: tests of a machine, from its packages to a PPO update, that stop at the first fault."""
