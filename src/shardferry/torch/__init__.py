"""PyTorch: fill and save sharded models."""
