"""Bytes in motion: local files, object stores and servers behind one protocol. Nothing here knows what a tensor is."""
