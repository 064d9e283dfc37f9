"""Judges: language models that grade or compare responses. They run behind an endpoint or in this process."""
