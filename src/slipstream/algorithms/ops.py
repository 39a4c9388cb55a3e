"""Array operations that losses are written against, so that one source runs on torch and numpy.

Owns: the ``Ops`` protocol and its numpy and torch forms.  Refuses: devices, autograd engines' details.

Losses use Python operators (``+ - * /``, comparisons, indexing by an integer array) and these functions,
nothing else.  ``stop_gradient`` is the identity in numpy.  Segment functions reduce a flat ``(N,)`` array
over rows given an ``(N,)`` integer array of row numbers; an empty segment yields 0.

>>> xp = numpy_ops()
>>> xp.segment_mean(np.array([1.0, 3.0, 5.0]), np.array([0, 0, 1]), 2).tolist()
[2.0, 5.0]
"""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol

import numpy as np

Array = Any
"""A float array of the namespace in use: ``numpy.ndarray`` or ``torch.Tensor``."""


class Ops(Protocol):
    """The namespace.  ``like`` gives dtype and device; float data becomes ``like``'s dtype."""

    def asarray(self, values: Any, like: Array) -> Array: ...

    def index_array(self, values: Any, like: Array) -> Array: ...

    def exp(self, x: Array) -> Array: ...

    def log(self, x: Array) -> Array: ...

    def sqrt(self, x: Array) -> Array: ...

    def abs(self, x: Array) -> Array: ...

    def sigmoid(self, x: Array) -> Array: ...

    def where(self, condition: Array, a: Any, b: Any) -> Array: ...

    def minimum(self, a: Array, b: Any) -> Array: ...

    def maximum(self, a: Array, b: Any) -> Array: ...

    def clip(self, x: Array, low: float | None, high: float | None) -> Array: ...

    def stop_gradient(self, x: Array) -> Array: ...

    def as_float(self, condition: Array, like: Array) -> Array:
        """Booleans as 0 and 1 in ``like``'s dtype."""
        ...

    def isfinite(self, x: Array) -> Array: ...

    def sum(self, x: Array, axis: int | None = None, keepdims: bool = False) -> Array: ...

    def max(self, x: Array, axis: int | None = None, keepdims: bool = False) -> Array: ...

    def segment_sum(self, x: Array, segments: Array, count: int) -> Array: ...

    def segment_mean(self, x: Array, segments: Array, count: int) -> Array: ...


class NumpyOps:
    """The float64 reference."""

    def asarray(self, values: Any, like: Array) -> Array:
        return np.asarray(values, dtype=like.dtype)

    def index_array(self, values: Any, like: Array) -> Array:
        return np.asarray(values, dtype=np.int64)

    def exp(self, x: Array) -> Array:
        return np.exp(x)

    def log(self, x: Array) -> Array:
        return np.log(x)

    def sqrt(self, x: Array) -> Array:
        return np.sqrt(x)

    def abs(self, x: Array) -> Array:
        return np.abs(x)

    def sigmoid(self, x: Array) -> Array:
        # The two-sided form: neither exponential can overflow.
        e = np.exp(-np.abs(x))
        return np.where(x >= 0, 1 / (1 + e), e / (1 + e))

    def where(self, condition: Array, a: Any, b: Any) -> Array:
        return np.where(condition, a, b)

    def minimum(self, a: Array, b: Any) -> Array:
        return np.minimum(a, b)

    def maximum(self, a: Array, b: Any) -> Array:
        return np.maximum(a, b)

    def clip(self, x: Array, low: float | None, high: float | None) -> Array:
        return np.clip(x, low, high)

    def stop_gradient(self, x: Array) -> Array:
        return x

    def as_float(self, condition: Array, like: Array) -> Array:
        return condition.astype(like.dtype)

    def isfinite(self, x: Array) -> Array:
        return np.isfinite(x)

    def sum(self, x: Array, axis: int | None = None, keepdims: bool = False) -> Array:
        return np.sum(x, axis=axis, keepdims=keepdims)

    def max(self, x: Array, axis: int | None = None, keepdims: bool = False) -> Array:
        return np.max(x, axis=axis, keepdims=keepdims)

    def segment_sum(self, x: Array, segments: Array, count: int) -> Array:
        return np.bincount(segments, weights=x, minlength=count)

    def segment_mean(self, x: Array, segments: Array, count: int) -> Array:
        sizes = np.bincount(segments, minlength=count)
        return self.segment_sum(x, segments, count) / np.maximum(sizes, 1)


class TorchOps:
    """Torch; every function keeps the autograd graph except ``stop_gradient``."""

    def __init__(self) -> None:
        import torch

        self._torch = torch

    def asarray(self, values: Any, like: Array) -> Array:
        return self._torch.as_tensor(values, dtype=like.dtype, device=like.device)

    def index_array(self, values: Any, like: Array) -> Array:
        return self._torch.as_tensor(values, dtype=self._torch.int64, device=like.device)

    def exp(self, x: Array) -> Array:
        return self._torch.exp(x)

    def log(self, x: Array) -> Array:
        return self._torch.log(x)

    def sqrt(self, x: Array) -> Array:
        return self._torch.sqrt(x)

    def abs(self, x: Array) -> Array:
        return self._torch.abs(x)

    def sigmoid(self, x: Array) -> Array:
        return self._torch.sigmoid(x)

    def where(self, condition: Array, a: Any, b: Any) -> Array:
        return self._torch.where(condition, a, b)

    def _tensor(self, value: Any, like: Array) -> Array:
        return value if self._torch.is_tensor(value) else self._torch.full_like(like, value)

    def minimum(self, a: Array, b: Any) -> Array:
        return self._torch.minimum(a, self._tensor(b, a))

    def maximum(self, a: Array, b: Any) -> Array:
        return self._torch.maximum(a, self._tensor(b, a))

    def clip(self, x: Array, low: float | None, high: float | None) -> Array:
        return self._torch.clamp(x, min=low, max=high)

    def stop_gradient(self, x: Array) -> Array:
        return x.detach()

    def as_float(self, condition: Array, like: Array) -> Array:
        return condition.to(like.dtype)

    def isfinite(self, x: Array) -> Array:
        return self._torch.isfinite(x)

    def sum(self, x: Array, axis: int | None = None, keepdims: bool = False) -> Array:
        return x.sum() if axis is None else x.sum(dim=axis, keepdim=keepdims)

    def max(self, x: Array, axis: int | None = None, keepdims: bool = False) -> Array:
        return x.max() if axis is None else x.amax(dim=axis, keepdim=keepdims)

    def segment_sum(self, x: Array, segments: Array, count: int) -> Array:
        return x.new_zeros(count).index_add(0, segments, x)

    def segment_mean(self, x: Array, segments: Array, count: int) -> Array:
        sizes = self._torch.bincount(segments, minlength=count).clamp(min=1).to(x.dtype)
        return self.segment_sum(x, segments, count) / sizes


@cache
def numpy_ops() -> Ops:
    """The numpy namespace."""
    return NumpyOps()


@cache
def torch_ops() -> Ops:
    """The torch namespace; imports torch on the first call."""
    return TorchOps()
