"""Judges: language models that are asked how good a response is, behind an endpoint or in this process."""
