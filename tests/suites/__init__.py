"""Other projects' tests, unmodified, against stock vLLM and against `vllm-tetri up`."""
