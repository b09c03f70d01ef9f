"""Prices: rates of machines, times of buckets and a clock, in integers. Knows no plans, tensors or ranks' processes."""
