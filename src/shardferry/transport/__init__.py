"""Agreement and bytes between ranks."""
