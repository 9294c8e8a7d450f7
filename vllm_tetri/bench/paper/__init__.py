"""`vllm-tetri bench paper`: the papers' experiments, simulated."""
