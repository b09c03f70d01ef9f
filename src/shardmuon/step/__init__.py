"""The optimizer step: validation of gradients and state, the plan, and the updates of momentum and weights."""
