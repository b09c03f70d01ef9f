"""Operations on gradients before a step: clipping by a norm over all ranks, and loss scaling.

This package is allowed to import the package `step` and everything that `step` is allowed to import.
"""
