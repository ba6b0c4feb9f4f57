"""What needs neither SGLang nor torch."""
