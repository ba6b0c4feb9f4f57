"""kvtier as a secondary tier of vLLM's own offloading, with the real vLLM."""
