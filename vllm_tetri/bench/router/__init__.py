"""`vllm-tetri bench router`: what the router adds."""
