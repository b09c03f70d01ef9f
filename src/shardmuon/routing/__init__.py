"""Assign each parameter of a model to Muon or AdamW based on the model's structure, and explain each choice."""
