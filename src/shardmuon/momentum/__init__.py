"""Storage of momentum, with a choice of dtype and device, 8-bit codes and stochastic rounding."""
