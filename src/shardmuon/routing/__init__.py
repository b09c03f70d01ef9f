"""Routing, which assigns each parameter of a model to Muon or AdamW based on the model's structure, and gives the
reason."""
