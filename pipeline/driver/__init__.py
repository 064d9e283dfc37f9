"""The driver, which is the process that controls a run: its main program, its executor, and its cluster of workers."""
