"""What runs in worker processes, and what travels between them and the driver. Imports observe, config and below."""
