"""Routing: assigns each parameter of a model to Muon or AdamW by the model's structure, and gives the reason. Does not
know about plans or communication."""
