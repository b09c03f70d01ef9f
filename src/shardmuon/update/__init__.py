"""Element-wise rules on shards: momentum and its stores, weights, AdamW, the stages of variants."""
