"""Exit codes of the command line. Imports nothing."""

DONE, BAD_INPUT, STAGE_FAILED, INTERRUPTED = 0, 2, 3, 130
