"""`python -m shardmuon.demo`: a small language model on real text in any layout, with a proof of its last update.

An example of how to use the library with torch's own parallelisms; nothing outside this package imports it.
"""
