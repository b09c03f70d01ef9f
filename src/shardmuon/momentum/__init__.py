"""Storage of momentum: dtype, device, 8-bit codes and stochastic rounding."""
