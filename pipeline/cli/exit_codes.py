"""Exit codes of the command line. Imports nothing."""

DONE = 0
BAD_INPUT = 2
"""Refused, and nothing was started: a config, an argument, a directory or what is stored there cannot be used. Of
`stageline check RUN` also: looked at, and not sound."""
STAGE_FAILED = 3
"""A run that had started ended before its last step, of a stage, a disk or what it found stored: it can be resumed. Of
`replay`: other weights."""
INTERRUPTED = 130
DRIVER_LOST = 4
"""Of `stageline worker`: the driver is gone without a word. Another worker of the same kind may join the next one."""
RESUMABLE = 75
"""Of a cluster's job alone (EX_TEMPFAIL of sysexits.h): it ended early, and started again it goes on."""
