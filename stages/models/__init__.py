"""A model's architecture and files; the trained models and the reference, held by megatron-core: the only folder that
imports it."""
