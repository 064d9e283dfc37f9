"""The embedded generation engine: a plain loop over rows, and what it stands on; drafts/, ranks/ and migration/ are
removable."""
