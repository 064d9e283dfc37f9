"""Code for this machine: C that is compiled where it runs (the compiler's call, and the numbers that all of it shares),
and processes that end with their parent."""
