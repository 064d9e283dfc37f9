"""Code that runs in worker processes, and messages between them and the driver. It may import `observe`, `config` and
the folders below them."""
