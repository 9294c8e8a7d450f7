"""Simulated engines: what each does in a step."""
