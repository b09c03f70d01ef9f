"""Layouts, which describe the part of each matrix that each rank stores. Optimizer steps, gradient clipping and
checkpoints read the layouts of all parameters from a table."""
