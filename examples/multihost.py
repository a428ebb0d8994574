"""Several hosts restore one checkpoint, each its own shards, and save it together.

On a cluster, start `restore_and_save` on every host after `jax.distributed.initialize()`. Here, two processes with four
simulated devices each stand for hosts:

    python examples/multihost.py
"""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

PROCESSES, DEVICES = 2, 4


def restore_and_save(source: str, destination: str) -> None:
    """Restore a checkpoint over all devices, and save it. Every process runs this."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    import orbax_safetensors as ost

    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(-1, DEVICES), ("hosts", "chips"))

    def sharding(name: str, shape: tuple[int, ...]) -> NamedSharding:
        """Rows over hosts, columns over the devices of a host."""
        return NamedSharding(mesh, PartitionSpec("hosts", "chips") if len(shape) == 2 else PartitionSpec())

    target = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding(name, leaf.shape))
        for name, leaf in ost.open_checkpoint(source).leaves.items()
    }
    planned = ost.plan_restore(source, target).processes[jax.process_index()]
    params = ost.load(source, target)
    print(f"process {jax.process_index()} of {jax.process_count()} read {planned.read_bytes} bytes", flush=True)
    ost.save(destination, params)


def main() -> None:
    """Make a checkpoint, start the processes, and compare what they have saved with the `safetensors` package."""
    import numpy as np
    from safetensors.numpy import load_file, save_file

    with tempfile.TemporaryDirectory() as directory:
        source, destination = f"{directory}/source", f"{directory}/saved"
        rng = np.random.default_rng(0)
        tensors = {f"layers.{i}.weight": rng.standard_normal((256, 512), np.float32) for i in range(8)}
        tensors["norm.weight"] = rng.standard_normal(512, np.float32)
        os.mkdir(source)
        save_file(tensors, f"{source}/model.safetensors", {"format": "pt"})
        print(f"{sum(array.nbytes for array in tensors.values())} bytes in {len(tensors)} tensors")

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            coordinator = f"127.0.0.1:{free.getsockname()[1]}"
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
        }
        started = [
            subprocess.Popen([sys.executable, __file__, coordinator, str(rank), source, destination], env=environment)
            for rank in range(PROCESSES)
        ]
        if failed := [process.args for process in started if process.wait()]:
            sys.exit(f"failed: {failed}")

        saved = load_file(Path(destination) / "model.safetensors")
        assert saved.keys() == tensors.keys()
        assert all(saved[name].tobytes() == array.tobytes() for name, array in tensors.items())
        print("saved together: every tensor is the same, bit for bit")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        import jax

        address, rank, source, destination = sys.argv[1:]
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, PROCESSES, int(rank))
        restore_and_save(source, destination)
    else:
        main()
