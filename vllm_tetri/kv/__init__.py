"""Paged KV tensors as bytes. Needs torch and the native core, never vllm."""
