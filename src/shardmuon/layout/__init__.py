"""Layouts. The layout of a parameter describes which part of each of its matrices each rank stores. The ranks build a
table of the layouts of all parameters, which optimizer steps, gradient clipping and checkpoints read."""
