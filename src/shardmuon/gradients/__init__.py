"""Gradients before a step: their norm over all ranks, clipping, loss scaling. May import `step`, and all that `step`
may import.
"""
