"""The driver process, which controls a run: its main program, its executor, and its cluster of workers."""
