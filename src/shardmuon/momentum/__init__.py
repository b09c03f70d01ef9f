"""Storage of momentum in a chosen dtype or as 8-bit codes, on a chosen device, with optional stochastic rounding."""
