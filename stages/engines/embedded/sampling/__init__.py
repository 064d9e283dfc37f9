"""From logits to tokens: keyed noise and the draw."""
