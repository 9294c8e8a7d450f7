"""`vllm-tetri bench suite`: every experiment, one after the other."""
