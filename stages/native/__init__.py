"""C that is compiled on the machine it runs on: the compiler's call, and the numbers that all of it shares."""
