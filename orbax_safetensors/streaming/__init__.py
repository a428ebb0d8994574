"""Checkpoints from files to files, in tiles: what is in memory at any time does not depend on the size of the model.

`work` plans and does a conversion: from a `TileSource` (`safetensors_source`, `orbax_source`) into an `Output`
(`files_output`, `objects_output`, `orbax_output`), which has a sink of its own. `pipeline` reads one batch of tiles
while it writes the one before.
"""
