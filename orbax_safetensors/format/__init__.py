"""The `.safetensors` format: bytes to facts and back. No I/O and no jax in here."""
