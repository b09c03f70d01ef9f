"""The arithmetic on a parameter's own numbers: momentum, what it is stored as and where, rounding, decay and update.
Knows no plan.
"""
