"""Frameworks that call the optimizer: one folder each, and nothing below imports them."""
