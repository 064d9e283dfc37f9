"""The decoder's forward pass."""
