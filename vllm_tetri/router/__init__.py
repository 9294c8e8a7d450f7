"""The OpenAI-compatible door: global scheduler, request table, relay to the instances."""
