"""Operations of a trained transformer block between its matrix products: in plain torch, and in C for CPUs."""
