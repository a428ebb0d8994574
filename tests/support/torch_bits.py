"""PyTorch's tensors as NumPy arrays of the same bits. To be imported once it is known that PyTorch is there."""

import warnings

import ml_dtypes
import numpy as np
import torch

# PyTorch's dtypes that NumPy has only with ml_dtypes, or by another name.
_NUMPY = {
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.float8_e5m2: ml_dtypes.float8_e5m2,
    torch.float8_e8m0fnu: ml_dtypes.float8_e8m0fnu,
    torch.float8_e4m3fnuz: ml_dtypes.float8_e4m3fnuz,
    torch.float8_e5m2fnuz: ml_dtypes.float8_e5m2fnuz,
}


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    return np.dtype(_NUMPY.get(dtype) or str(dtype).removeprefix("torch."))


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A copy, whatever the tensor's strides are."""
    shape, dtype = tuple(tensor.shape), numpy_dtype(tensor.dtype)
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().copy().view(dtype).reshape(shape)


def to_torch(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """A copy of `array`, whose dtype is what `numpy_dtype` has for `dtype`."""
    assert array.dtype == numpy_dtype(dtype)
    return torch.from_numpy(array.reshape(-1).view(np.uint8).copy()).view(dtype).reshape(array.shape)


def quietly(function, state, **kwargs):
    """Calls a function of `torch.distributed.checkpoint` in this process alone, which it warns of."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        function(state, no_dist=True, **kwargs)
