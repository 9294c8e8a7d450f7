"""`vllm-tetri bench flip`: what roles cost and gain when they change."""
