"""Code in C that is compiled on the machine where it runs, and the ties between processes of one host."""
