"""The optimizer step: validation, plan, and update of momentum and weights."""
