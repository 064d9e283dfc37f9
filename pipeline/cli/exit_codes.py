"""Exit codes of the command line. Imports nothing."""

DONE, BAD_INPUT, STAGE_FAILED, INTERRUPTED = 0, 2, 3, 130
RESUMABLE = 75
"""Of a cluster's job alone (EX_TEMPFAIL of sysexits.h): it ended early, and started again it goes on."""
