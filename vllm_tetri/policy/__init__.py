"""Decisions as pure functions over frozen values; clock and randomness are passed in."""
