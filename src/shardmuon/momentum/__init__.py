"""Stored momentum: dtype, place, codes, and rounding at random. Knows no plan."""
