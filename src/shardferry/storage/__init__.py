"""Bytes of files: local disks, memory."""
