"""Ways to break what runs: processes that die or stop, connections that fail."""
