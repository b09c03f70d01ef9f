"""Routing: a model's parameters sorted into matrices and others by its structure, with reasons. Knows no plan."""
