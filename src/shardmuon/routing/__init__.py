"""Routing: the assignment of each parameter of a model to Muon or AdamW by the model's structure, with the reason."""
