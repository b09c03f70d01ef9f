"""Parts of a step that look at one parameter or group alone: what a group says (`settings`, `new_group`, `rates`), what
must be true of its tensors (`checks`, `replicas`, `zero_weights`), what variants keep (`kept`), AdamW. Knows no plan.
"""
