"""One of two processes that save tensors with `torch.distributed.checkpoint`; `test_torch_distributed.py` starts them.

    python dcp_writer.py DIRECTORY RANK

Every tensor is sharded by a dimension, or replicated. Each process writes its own pieces.
"""

import os
import sys
from pathlib import Path

import torch

PROCESSES = 2
# For each tensor its shape, dtype, and the dimension by which it is sharded, if any. Some do not divide by two.
TENSORS = {
    "layers.0.rows": ((10, 6), torch.float32, 0),
    "layers.0.uneven": ((7, 3), torch.bfloat16, 0),
    "layers.1.columns": ((4, 9), torch.bfloat16, 1),
    "layers.1.middle": ((3, 6, 5), torch.int16, 1),
    "layers.1.last": ((2, 3, 8), torch.float16, 2),
    "norm": ((12,), torch.float32, 0),
    "one": ((1, 4), torch.float32, 0),
    "replicated": ((3, 4), torch.int32, None),
    "step": ((), torch.int64, None),
}
# Which file each tensor is in where there are several.
FILES = {name: 1 if name.startswith("layers") else 2 for name in TENSORS}


def tensors() -> dict[str, torch.Tensor]:
    """Whole tensors, the same in every process."""
    random = torch.Generator().manual_seed(0)
    out = {}
    for name, (shape, dtype, _) in TENSORS.items():
        count = torch.Size(shape).numel() * dtype.itemsize
        out[name] = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=random).view(dtype).reshape(shape)
    return out


def main(directory: Path, rank: int) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group(
        "gloo", init_method=(directory / "rendezvous").as_uri(), rank=rank, world_size=PROCESSES
    )
    mesh = init_device_mesh("cpu", (PROCESSES,))
    state = {}
    for name, tensor in tensors().items():
        dimension = TENSORS[name][2]
        placement = Replicate() if dimension is None else Shard(dimension)
        # Each process cuts its own piece, because gloo cannot send all of the dtypes.
        state[name] = distribute_tensor(tensor, mesh, [placement], src_data_rank=None)
    # PyTorch puts only tensors of floats together again.
    floats = {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}
    for kind, own in (("sharded", state), ("consolidated", floats)):
        for place, files in (("one", None), ("several", {name: FILES[name] for name in own})):
            writer = dcp.HuggingFaceStorageWriter(
                os.fspath(directory / f"{kind}-{place}"),
                fqn_to_index_mapping=files,
                save_distributed=True,
                enable_consolidation=kind == "consolidated",
            )
            dcp.save(own, storage_writer=writer)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
