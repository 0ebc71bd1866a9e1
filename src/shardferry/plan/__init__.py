"""Decisions: pure functions from layouts to plans."""
