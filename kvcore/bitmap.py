"""Sets of small numbers as Python integers: bit i stands for chunk i, length i or key i.

Theory of operation
-------------------
Presence in a cache of many rows and thousands of chunks is asked for at every lookup, so no step may touch cells one
by one. An arbitrary-size integer is the set: AND, OR and shift run over 30 chunks per machine operation, copies are
free (integers are immutable), and equality is the equality of the sets.

1. `ones(n)` is {0 .. n-1}: the cells of a full prefix of n chunks, or all lengths below n.
2. `trailing_ones(x)` is the length of the unbroken run that starts at bit 0: adding one carries through exactly that
   run, so x XOR x+1 covers it and the zero behind it.
3. `run_starts(x, width)` keeps bit i iff bits i .. i+width-1 are all set. Doubling: two runs of length k that begin k
   apart make the run of length 2k, so log2(width) shifts and ANDs are enough; the last step is a shorter one.
4. `windowed(x, width, length)` turns presence into lengths: bit L iff the `width` chunks before L are all set. Below
   chunk 0 lie `width` virtual chunks that are always there, which is the clamp max(0, L - width) without a branch.

Rejected: numpy boolean arrays (a call costs more than a whole 4,096-bit AND, and they are neither hashable nor
immutable); a bit array package (one more dependency for six one-line functions).

Nothing is held here: every function takes and gives plain values.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import compress

from kvcore.errors import CallerError

_DIGIT_TO_TRUTH = bytes.maketrans(b"01", b"\x00\x01")


def ones(count: int) -> int:
    """The set {0 .. count-1}."""
    assert count >= 0
    return (1 << count) - 1


def span(start: int, stop: int) -> int:
    """The set {start .. stop-1}; empty when stop <= start."""
    assert start >= 0
    return ((1 << (stop - start)) - 1) << start if stop > start else 0


def trailing_ones(bitmap: int) -> int:
    """How many bits are set from bit 0 on before the first zero."""
    assert bitmap >= 0
    return (bitmap ^ (bitmap + 1)).bit_length() - 1


def run_starts(bitmap: int, width: int) -> int:
    """Bit i is set iff bits i .. i+width-1 of `bitmap` are. width >= 1."""
    assert bitmap >= 0
    assert width >= 1
    covered = 1
    while covered < width:
        step = min(covered, width - covered)
        bitmap &= bitmap >> step
        covered += step
    assert covered == width
    return bitmap


def windowed(bitmap: int, width: int, length: int) -> int:
    """Bit L (0 <= L <= length) is set iff bits max(0, L-width) .. L-1 of `bitmap` are."""
    assert width >= 0
    lengths = ones(length + 1)
    width = min(width, length)  # for every L <= length a wider window asks for the same cells
    if width == 0:
        return lengths
    return run_starts(bitmap << width | ones(width), width) & lengths


def bits(bitmap: int) -> Iterator[int]:
    """The members, ascending. Linear in the highest bit (peeling off the lowest bit would be quadratic)."""
    assert bitmap >= 0
    digits = format(bitmap, "b").encode().translate(_DIGIT_TO_TRUTH)
    return compress(range(len(digits)), reversed(digits))


def to_bytes(bitmap: int, length: int) -> bytes:
    """`length` bits as ceil(length / 8) bytes, bit 0 first (little endian)."""
    assert bitmap >= 0
    assert bitmap.bit_length() <= length
    return bitmap.to_bytes((length + 7) // 8, "little")


def from_bytes(data: bytes | bytearray | memoryview, length: int) -> int:
    """The inverse of `to_bytes`. Refuses bytes that `to_bytes(..., length)` cannot have made."""
    bitmap = int.from_bytes(data, "little")
    if len(data) != (length + 7) // 8 or bitmap.bit_length() > length:
        raise CallerError(f"expected a bitmap of {length} bits, got {len(data)} bytes with {bitmap.bit_length()} bits")
    return bitmap
