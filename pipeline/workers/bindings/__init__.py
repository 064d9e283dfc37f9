"""How a worker runs each stage: small functions by concern, and the registry that binds them to the graph's stages."""
