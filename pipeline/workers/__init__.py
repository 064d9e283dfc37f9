"""Code that runs in worker processes, and messages between them and the driver. Imports observe, config and below."""
