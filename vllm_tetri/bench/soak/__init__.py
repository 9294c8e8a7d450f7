"""`vllm-tetri bench soak`: what a cluster keeps while it is broken again and again."""
