"""Compression of real KV: a model trained here, what its past bears, and what codecs make of it."""
