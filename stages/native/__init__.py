"""Compilation of C code on the machine where it runs, and the fingerprint of a process: the items on which the last
bits of its results depend."""
