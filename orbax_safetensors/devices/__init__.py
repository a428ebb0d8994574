"""`jax.Array` and `jax.distributed`: shards, partitions, trees, and agreement between processes."""
