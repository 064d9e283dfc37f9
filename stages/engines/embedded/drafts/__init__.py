"""Speculative decoding: drafters, the choice of guesses to verify, and their costs and gains."""
