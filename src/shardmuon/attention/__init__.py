"""QK-clip: attention logits kept below a threshold by scaling the rows of query and key weights, on any sharding."""
