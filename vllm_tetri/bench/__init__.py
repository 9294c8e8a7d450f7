"""Benchmarks of whole instances and clusters, and their pictures."""
