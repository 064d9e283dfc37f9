"""Sandboxes: processes for code that the run does not trust. This is the code of users' own rewards, and of scorers
that may evaluate a response. `process` starts a sandbox, `inside` runs in it, `answers` scores text in it, `channel`
carries its messages, `kernel` makes the system calls.
"""
