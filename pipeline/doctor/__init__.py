"""`stageline doctor`: tests of a machine, from its packages to a PPO update. The tests stop at the first fault."""
