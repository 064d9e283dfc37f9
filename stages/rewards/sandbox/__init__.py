"""Sandboxes: processes for code that the run does not trust, namely users' own rewards and scorers that may evaluate a
response. `process` starts a sandbox, `inside` runs in it, `answers` scores text in it, `channel` carries its messages,
`kernel` makes the system calls."""
