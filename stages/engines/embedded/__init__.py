"""The embedded generation engine: a loop over rows. Speculative decoding (`drafts`), models that span processes
(`ranks`) and migration (`migration.py`) are optional: the engine runs without them."""
