"""The command line: one file per command. It may import every other package of this project."""
