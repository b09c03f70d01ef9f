"""Routing: assigns each parameter of a model to Muon or AdamW by the model's structure, and gives the reason. It does
not depend on plans."""
