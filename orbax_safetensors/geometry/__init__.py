"""Views of stored tensors, and the copies and requests that fill memory from them. No I/O and no JAX."""
