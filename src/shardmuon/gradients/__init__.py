"""Operations on gradients before an optimizer step: clipping by a norm over all ranks, and loss scaling for fp16.

This package may import the package `step` and everything that `step` may import.
"""
