"""Layouts: which rank stores which part of which matrix. The one table that step, clipping and checkpoints read."""
