"""Which parameters are matrices, which matrices they hold, and why: from the structure of the model.
Knows no plan.
"""
