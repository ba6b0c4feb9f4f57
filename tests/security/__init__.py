"""Who may call, and what a caller can learn of others."""
