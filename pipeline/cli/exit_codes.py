"""Exit codes of the command line. Imports nothing."""

DONE, BAD_INPUT, STAGE_FAILED, INTERRUPTED = 0, 2, 3, 130
DRIVER_LOST = 4
"""Of `stageline worker`: the driver is gone without a word. Another worker of the same kind may join the next one."""
RESUMABLE = 75
"""Of a cluster's job alone (EX_TEMPFAIL of sysexits.h): it ended early, and started again it goes on."""
