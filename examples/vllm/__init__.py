"""vLLM with kvtier: what it looks like from outside, over vLLM's own HTTP interface."""
