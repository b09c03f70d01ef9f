"""Gradients before a step: their norm over all ranks, clipping, loss scaling. May import what `step` may, and
`step`.
"""
