"""Linear layers in the CPU library's own weight layout, with fused epilogues.

Owns: ``PackedLinear`` (one or several checkpoint matrices stacked into one product), and ``product`` for weights that
change too often to be packed.  Refuses: gradients.

oneDNN re-packs a plain weight on *every* call, which at 1 to 32 rows costs more than the product.  Here the
weight is packed once; reading it back (``plain``) is exact, so a checksum covers the bytes that are really used.
On machines without oneDNN, and on accelerators, the same class holds plain weights.

>>> layer = PackedLinear(torch.eye(4))
>>> layer(torch.ones(1, 4)).tolist()
[[1.0, 1.0, 1.0, 1.0]]
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.nn.functional as F

_SHAPES = "256"
"""Shapes of products that torch and oneDNN remember, in place of 1024.  Each holds up to 1 MB, and updates and prefill
have new numbers of rows nearly every time: a run's memory grew by 12 MB a step.  Fewer slow down decoding, in which the
rows fall one by one (measured: 5 % at 128).  Read at the first product."""
for _variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_variable, _SHAPES)

_PIECES = (1024, 256, 128)
"""A product of more rows than the last is made of pieces of these sizes and a rest.  Torch keeps the last thousand
shapes of these products with what each needed (measured: as much as the result, 3 MB at 1,000 rows), and prefill comes
in a new length nearly every time."""
_ROWS_HINT = 32  # oneDNN wants a typical row count; measured, the packed layout is the same for 1 to 256


def packable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN has fast packed products for this device and dtype."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, plus: torch.Tensor | None = None
) -> torch.Tensor:
    """``x W^T + b + plus`` for a plain, possibly transposed ``weight`` (out, in), without autograd.

    In float32 by oneDNN, which reads a plain weight about a tenth faster than the BLAS behind torch's own product
    (measured on 800 rows) and adds ``plus`` on the way out.  In bfloat16 torch's own is as fast, and keeps nothing for
    each new number of rows, where the other keeps up to 3 MB.
    """
    if weight.dtype is torch.float32 and packable(weight.device, weight.dtype):
        if plus is None:
            return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(x, plus, weight, bias, "add")
    out = F.linear(x, weight, bias)
    return out if plus is None else out.add_(plus)


class PackedLinear:
    """``y = x W^T + b`` for ``x`` of shape (rows, in_features), plus three fused epilogues."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype, self.device = weight.dtype, weight.device
        self.bias = None if bias is None else bias.detach().clone()
        self._packed = packable(weight.device, weight.dtype)
        self._open: torch.Tensor | None = None
        """Rows written so far; ``_missing`` says which are not."""
        self._missing = torch.zeros(0, dtype=torch.bool)
        self._weight = self._pack(weight.detach())

    def _pack(self, weight: torch.Tensor) -> torch.Tensor:
        if self._packed:
            return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
        return weight.clone()

    def memory(self) -> tuple[int, int]:
        """Address and bytes of the weight; they stay what they are."""
        if self._packed:
            return torch.ops.mkldnn.data_ptr(self._weight), torch.ops.mkldnn._nbytes(self._weight)
        return self._weight.data_ptr(), self._weight.nbytes

    def _replace(self, weight: torch.Tensor) -> None:
        """Put other numbers where the old ones lie, so that the pages below them can be chosen once."""
        self._open = None
        # A packed tensor keeps its memory when it is given another one of the same layout (a test holds torch to it).
        self._weight.copy_(self._pack(weight) if self._packed else weight)

    def plain(self) -> torch.Tensor:
        """The weight (out, in) as the kernel holds it, or will after ``commit``; not to be written."""
        held = self._weight
        if self._packed and (self._open is None or bool(self._missing.any())):
            held = held.to_dense()
        if self._open is None:
            return held
        if bool(self._missing.any()):
            self._open[self._missing] = held[self._missing]
            self._missing.zero_()
        return self._open

    def write_rows(self, begin: int, end: int, value: torch.Tensor) -> None:
        """Overwrite rows; takes effect at ``commit`` at the latest (at once where ``value`` is the whole matrix).

        Nothing is unpacked for a matrix that is written completely.
        """
        if end - begin == self.out_features:
            self._replace(value)
            return
        if self._open is None:
            shape = (self.out_features, self.in_features)
            self._open = torch.empty(shape, dtype=self.dtype, device=self.device)
            self._missing = torch.ones(self.out_features, dtype=torch.bool, device=self.device)
        self._open[begin:end].copy_(value)
        self._missing[begin:end] = False

    def commit(self) -> None:
        """Pack what ``write_rows`` wrote."""
        if self._open is not None:
            self._replace(self.plain())

    def _by_rows(self, x: torch.Tensor, run: Callable[[slice], torch.Tensor]) -> torch.Tensor:
        """``run`` over pieces of ``x``: all rows at once, or in pieces of a few sizes where there are many."""
        total = len(x)
        if total <= _PIECES[-1]:
            return run(slice(None))
        out = x.new_empty((total, self.out_features))
        begin = 0
        while begin < total:
            left = total - begin
            end = begin + next((size for size in _PIECES if size <= left), left)
            out[begin:end] = run(slice(begin, end))
            begin = end
        return out

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x W^T + b``."""
        if self._packed:
            product = torch.ops.mkldnn._linear_pointwise
            return self._by_rows(x, lambda at: product(x[at], self._weight, self.bias, "none", [], ""))
        return F.linear(x, self._weight, self.bias)

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        """``silu(x W^T + b)``."""
        if self._packed:
            product = torch.ops.mkldnn._linear_pointwise
            return self._by_rows(x, lambda at: product(x[at], self._weight, self.bias, "swish", [], ""))
        return F.silu(F.linear(x, self._weight, self.bias))

    def times(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """``(x W^T + b) * other``."""
        if self._packed:
            product = torch.ops.mkldnn._linear_pointwise.binary
            return self._by_rows(x, lambda at: product(x[at], other[at], self._weight, self.bias, "mul"))
        return F.linear(x, self._weight, self.bias).mul_(other)

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """``x W^T + b + other``."""
        if self._packed:
            product = torch.ops.mkldnn._linear_pointwise.binary
            return self._by_rows(x, lambda at: product(x[at], other[at], self._weight, self.bias, "add"))
        return F.linear(x, self._weight, self.bias).add_(other)
