"""Compilation of C code on the machine where it runs, and the fingerprint of what decides the last bits of results."""
