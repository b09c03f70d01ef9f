"""Gradients before a step: their norm over all ranks, clipping, loss scaling.

This package may import `step` and anything that `step` may import.
"""
