"""Bytes in motion between storage and memory. Nothing in here knows what a tensor is."""
