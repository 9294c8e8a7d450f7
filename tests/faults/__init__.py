"""Ways to break what runs: connections that fail, hosts that are cut off."""
