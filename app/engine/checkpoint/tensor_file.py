"""Write named tensors to a safetensors file (https://github.com/huggingface/safetensors#format).

    8 bytes   length of the header, little-endian
    header    JSON: name -> {dtype, shape, data_offsets: [begin, end) after the header};
    __metadata__: text -> text
    rest      the tensors' bytes, one after the other

The safetensors library reads it (`safe_open`), but writes only to a path or to bytes in memory.
Here the bytes go to the disk and into a checksum in one pass, without a second copy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.uint8: "U8",
}
METADATA = "__metadata__"
ALIGNMENT = 8  # bytes; of the start of the tensors
WRITE_BYTES = 2**26  # bytes per write


class Writable(Protocol):
    """File-like object that accepts bytes."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Append bytes."""


def write_tensors(
    file: Writable, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Write tensors of any device, largest element type first, so that all are aligned."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, Any] = {METADATA: dict(metadata)}
    end = 0
    for name, tensor in ordered:
        begin = end
        end = end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)  # the format allows trailing spaces
    file.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        for begin in range(0, len(data), WRITE_BYTES):
            file.write(data[begin : begin + WRITE_BYTES])
