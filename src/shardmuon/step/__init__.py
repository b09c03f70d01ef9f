"""The optimizer step: validating gradients and state, caching the plan, and updating momentum and weights."""
