"""Files of the repository that tests read."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "conf/run/tiny.yaml"
TINY_PROMPTS = ROOT / "conf/data/tiny_prompts.jsonl"
SMOLLM2 = ROOT / "assets/smollm2-135m-instruct"
"""The demo's model; tests that need it are marked `smollm2`, and skipped where `make assets` has not made it."""
MOVIE_REVIEWS = ROOT / "assets/movie_reviews.tsv"
