"""The `orbax-safetensors` command."""
