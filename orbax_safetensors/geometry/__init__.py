"""Views of stored tensors, and the copies and requests they come down to. No I/O and no JAX."""
