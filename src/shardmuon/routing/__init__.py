"""Routing: sorts a model's parameters into Muon's and AdamW's by the model's structure, with reasons. Knows no plan."""
