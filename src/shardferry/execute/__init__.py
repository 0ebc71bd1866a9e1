"""Runs plans over a store and a group, within a memory budget."""
