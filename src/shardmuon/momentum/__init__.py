"""Stored momentum: dtype, device, 8-bit codes and stochastic rounding. Independent of plans."""
