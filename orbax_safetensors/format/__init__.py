"""The `.safetensors` format: bytes to facts and back, without I/O and without JAX."""
