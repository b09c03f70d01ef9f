"""Layouts of parameters. A layout describes which parts of a parameter's matrices each rank stores. The ranks build a
table of all layouts, which optimizer steps, gradient clipping and checkpoints read."""
