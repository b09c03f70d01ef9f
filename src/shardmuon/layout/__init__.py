"""Layouts: which rank stores which part of each matrix, in a table that steps, clipping and checkpoints read."""
