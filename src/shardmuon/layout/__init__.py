"""Layouts, which describe the part of each matrix that each rank stores. Optimizer steps, gradient clipping and
checkpoints read them from a table."""
