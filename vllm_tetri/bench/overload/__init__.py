"""`vllm-tetri bench overload`: ten times what a cluster can serve, and what it keeps."""
