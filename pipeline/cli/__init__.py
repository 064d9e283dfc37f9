"""The command line: one file per command. Imports everything below."""
