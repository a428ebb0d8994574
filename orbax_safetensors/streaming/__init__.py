"""Checkpoints from files to files, in tiles: what is in memory at any time does not depend on the size of the model.

`pipeline` reads one batch of tiles while it writes the one before. Where tiles come from and where they go are a
`TileSource` and a `TileSink`, which `safetensors_source`, `safetensors_sink` and `orbax_tiles` have.
"""
