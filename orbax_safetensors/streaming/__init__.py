"""Checkpoints from files to files, in tiles: the memory in use does not depend on the size of the model.

`work` plans and runs a conversion: from a `TileSource` (`safetensors_source`, `orbax_source`) into an `Output`
(`files_output`, `objects_output`, `orbax_output`), each with its sink. `pipeline` reads one batch of tiles while it
writes the batch before.
"""
