"""`vllm-tetri bench modes`: our modes beside stock vLLM and replicas."""
