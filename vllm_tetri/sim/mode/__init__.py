"""How simulated requests find instances."""
