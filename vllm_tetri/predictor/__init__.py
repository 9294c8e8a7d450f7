"""How long will the answer be? Data, training, evaluation and serving (paper section 3.3.2)."""
