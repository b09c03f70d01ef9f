"""Stored momentum: dtype, device, 8-bit codes and stochastic rounding. Knows no plan."""
