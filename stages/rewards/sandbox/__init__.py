"""Processes that run code which is not trusted with the run: users' own rewards, and scorers that may evaluate a
response. `process` owns one, `inside` runs in it, `answers` scores text in it, `kernel` makes the system calls."""
