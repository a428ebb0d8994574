"""Checkpoints from files to files, in tiles: the memory in use does not depend on the size of the model.

`tile_job` runs a conversion from a `TileSource` (`tiles`; `safetensors_source`, `orbax_source`) into a `Sink`
(`sink`; `files_sink`, `objects_sink`, `orbax_sink`). `cutting` says how large tiles are. What is unfinished is a
`Workspace` (`storage/workspace.py`).
"""
