"""Output lengths: the length head, and what any predictor offers (paper section 3.3.2)."""
