"""Safetensors files as one checkpoint: opened, verified, and seen as the tree of a family."""
