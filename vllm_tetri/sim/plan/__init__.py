"""`vllm-tetri sim plan`: how many instances of which role."""
