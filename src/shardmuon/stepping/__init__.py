"""A step: what every parameter is like (`reading`), what the ranks agree on (`binding`), bucket by bucket the momentum,
the exchange, the orthogonalization and the update (`buckets`), and AdamW for the rest. May import planning, ranks,
engines, momentum, orthogonalize and the options.
"""
