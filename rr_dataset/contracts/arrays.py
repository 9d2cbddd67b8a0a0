"""From what lies on the wire to an integer array, without a copy where there is a way. Nothing in it is trusted.

Sizes are compared before anything is decoded; no pickle is read; what is no integer is refused.
"""

from __future__ import annotations

import binascii
import math
import re
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rr_dataset.errors import InvalidRoutingError, reason_of
from rr_dataset.masked import hides_values

_HEADER_BYTES = 1 << 12  # of a .npy file of one array without fields: 128 as numpy.save writes it
_NPY_HEADER = re.compile(
    rb"\{'descr': '([<>|=]?[iu][1248])', 'fortran_order': (True|False), 'shape': \(((?:[0-9]{1,10}, ?)*[0-9]{0,10})\),? \}\s*"
)


def refusal(contract: str, what: str, expected: object, came: object) -> InvalidRoutingError:
    """The error of a response that does not fit its contract."""
    return InvalidRoutingError(f"{contract}: {what}: expected {expected}; came {came}")


def is_text(value: object) -> bool:
    """Whether `value` may be base64."""
    return isinstance(value, (str, bytes, bytearray, memoryview))


def base64_bytes(contract: str, text: Any) -> int:
    """How many bytes `text` decodes to, told by its length alone.

    Raises InvalidRoutingError where it is cut.
    """
    if not is_text(text):
        raise refusal(contract, "routed_experts", "base64", f"a {type(text).__name__}")
    if len(text) % 4:
        raise refusal(contract, "base64", "a multiple of 4 characters", f"{len(text)}: it is cut")
    tail = text[-2:] if isinstance(text, str) else bytes(text[-2:]).decode("latin-1")
    return len(text) // 4 * 3 - tail.count("=")


def from_base64(contract: str, text: Any) -> bytes:
    """The bytes of standard base64 without line breaks.

    Raises InvalidRoutingError.
    """
    size = base64_bytes(contract, text)
    try:
        data = binascii.a2b_base64(text)
    except ValueError as error:  # binascii.Error, and what is not ASCII
        raise refusal(contract, "base64", f"{size} bytes of it", f"text that is none ({error})") from error
    if len(data) != size:  # characters that are no base64 are passed over
        raise refusal(contract, "base64", f"{size} bytes of it", f"{len(data)}: it has characters that are none")
    return data


def from_raw(contract: str, text: Any, dtype: npt.DTypeLike, shape: Sequence[int]) -> npt.NDArray[Any]:
    """Base64 of the bytes of an array whose dtype and shape are said elsewhere; read-only.

    Raises InvalidRoutingError.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    came = base64_bytes(contract, text)
    if came != size:
        raise refusal(contract, "size", f"{size} bytes for {_shown(shape)} of {np.dtype(dtype)}", f"{came} bytes")
    return _shaped(contract, np.frombuffer(from_base64(contract, text), dtype), shape)


def from_npy(contract: str, text: Any) -> npt.NDArray[Any]:
    """Base64 of a .npy file of integers; read-only.

    Raises InvalidRoutingError, also for objects (nothing is unpickled) and a header that promises more than is there.
    """
    data = from_base64(contract, text)
    version = data[6:8]
    length_bytes = 2 if version == b"\1\0" else 4
    at = 8 + length_bytes
    start = at + int.from_bytes(data[8:at], "little")
    if data[:6] != b"\x93NUMPY" or start > min(len(data), _HEADER_BYTES):
        raise refusal(contract, "routed_experts", "the bytes of a .npy file", repr(data[:10]))
    header = _NPY_HEADER.fullmatch(data, at, start)
    if header is None:
        raise refusal(
            contract, ".npy", "a header of integers as numpy.save writes it", repr(data[at : min(start, at + 80)])
        )
    dtype, shape = np.dtype(header[1].decode()), tuple(int(size) for size in header[3].split(b",") if size.strip())
    size, came = math.prod(shape) * dtype.itemsize, len(data) - start
    if size != came:
        raise refusal(contract, ".npy", f"{size} bytes for {_shown(shape)} of {dtype}", f"{came} bytes")
    order: Literal["F", "C"] = "F" if header[2] == b"True" else "C"
    return _shaped(contract, np.frombuffer(data, dtype, offset=start), shape, order)


def from_memory(contract: str, value: Any) -> npt.NDArray[Any]:
    """Of an array, a tensor on any device, or nested lists of numbers.

    Raises InvalidRoutingError.
    """
    try:
        if hasattr(value, "detach"):
            value = value.detach().cpu()
        hidden, array = hides_values(value), np.asarray(value)
    except Exception as error:  # ragged lists, foreign objects
        raise refusal(
            contract, "routed_experts", "an array of integers", f"a {type(value).__name__} ({reason_of(error)})"
        ) from error
    if hidden:
        raise refusal(contract, "routed_experts", "an array without masked values", "a masked array")
    if array.size or isinstance(value, np.ndarray):
        check_integers(contract, array.dtype)
        return array
    return array.astype(np.int32)  # an empty list has no dtype of its own


def check_integers(contract: str, dtype: np.dtype[Any]) -> None:
    """Raises InvalidRoutingError for what is no integer."""
    if dtype.kind not in "iu":
        raise refusal(contract, "dtype", "integers", dtype)


def minus_one(dtype: np.dtype[Any]) -> int:
    """What -1, which marks rows without routing, is in an integer dtype: wrapped to the greatest number where there is no sign."""
    return -1 if dtype.kind == "i" else int(np.iinfo(dtype).max)


def named_dtype(contract: str, name: Any, allowed: Sequence[str], default: str) -> np.dtype[Any]:
    """The dtype of a name on the wire.

    Raises InvalidRoutingError.
    """
    if name is None:
        return np.dtype(default)
    if name not in allowed:
        raise refusal(contract, "dtype", " or ".join(allowed), repr(name)[:80])
    dtype: np.dtype[Any] = np.dtype(name)
    return dtype


def checked_shape(contract: str, shape: Any) -> tuple[int, int, int]:
    """[tokens, layers, top_k] as the wire says it.

    Raises InvalidRoutingError.
    """
    sizes = tuple(shape) if isinstance(shape, (list, tuple)) else ()
    if len(sizes) != 3 or any(type(size) is not int or not 0 <= size < 1 << 31 for size in sizes):
        raise refusal(contract, "shape", "three sizes, [tokens, layers, top_k]", repr(shape)[:80])
    return sizes


def _shaped(
    contract: str, array: npt.NDArray[Any], shape: Sequence[int], order: Literal["F", "C"] = "C"
) -> npt.NDArray[Any]:
    try:
        return array.reshape(shape, order=order)
    except ValueError as error:  # sizes beyond what numpy counts to, or dimensions, of no bytes at all
        raise refusal(contract, "shape", "one that an array may have", f"{_shown(shape)[:80]} ({error})") from error


def _shown(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"
