"""Shipped test suites and strategies for stores, groups and layouts."""
