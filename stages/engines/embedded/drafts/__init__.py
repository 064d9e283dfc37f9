"""Speculative decoding: drafters, which drafts to verify, what they cost and gain."""
