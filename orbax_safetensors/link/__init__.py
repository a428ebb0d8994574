"""The job `link`: a checkpoint of Orbax that is an index of safetensors files; the files stay as they are."""
