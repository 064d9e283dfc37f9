"""The GenerationEngine protocol and the engines behind it."""
