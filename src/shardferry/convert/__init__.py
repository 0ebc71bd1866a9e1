"""Conversions as index maps from regions of target tensors to regions of stored tensors."""
