"""Moving KV blocks between instances."""
