"""Fleet decisions: pure functions over what is known of several hosts."""
