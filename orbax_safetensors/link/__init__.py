"""The job `link`: an Orbax checkpoint that is an index of safetensors files which stay as they are."""
