"""The embedded generation engine: a loop over rows. The engine works without drafts/, ranks/ and migration.py."""
