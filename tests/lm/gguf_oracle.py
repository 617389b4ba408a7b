"""What GGUF files should hold: a writer that lies on request, and the formulas of the block formats."""

import math
import struct

import numpy as np

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}

# ---- A writer that knows the format only from its description, and lies on request.


# Every type of a single value, at the ends of its range.
SCALARS = (
    *((U8, 255), (I8, -128), (U16, 65535), (I16, -32768), (U32, 2**32 - 1), (I32, -(2**31)), (F32, 0.5)),
    *((BOOL, True), (BOOL, False), (STRING, "Ünïcödé\0\n"), (STRING, "")),
    *((U64, 2**64 - 1), (I64, -(2**63)), (F64, math.pi)),
)


def text(value: str | bytes, length: int | None = None) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def pair(key: str | bytes, kind: int, *value) -> bytes:
    """A key and one value; bytes are taken as they are."""
    return text(key) + struct.pack("<I", kind) + payload(kind, *value)


def payload(kind: int, value) -> bytes:
    if isinstance(value, bytes):
        return value
    return text(value) if kind == STRING else struct.pack("<" + CODES[kind], value)


def array(kind: int, values, count: int | None = None) -> bytes:
    head = struct.pack("<IQ", kind, len(values) if count is None else count)
    return head + b"".join(payload(kind, value) for value in values)


def tensor(name: str | bytes, shape, kind: int, offset: int, dims: int | None = None) -> bytes:
    head = text(name) + struct.pack("<I", len(shape) if dims is None else dims)
    return head + b"".join(struct.pack("<Q", n) for n in reversed(shape)) + struct.pack("<IQ", kind, offset)


def gguf_bytes(pairs=(), tensors=(), data=b"", *, version=3, num_tensors=None, num_pairs=None, alignment=32) -> bytes:
    counts = (len(tensors) if num_tensors is None else num_tensors, len(pairs) if num_pairs is None else num_pairs)
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


def one_tensor(shape, kind: int, data: bytes, name="weight") -> bytes:
    return gguf_bytes((), [tensor(name, shape, kind, 0)], data)


# ---- The formats in float64, element by element as the C reference of ggml computes them.


def half(raw) -> float:
    return struct.unpack("<e", bytes(raw))[0]


def small_block(d, m, offset, quants, high=0):
    """Q4_0, Q4_1, Q5_0, Q5_1: nibbles of 32 elements, the first half low, with fifth bits in `high`."""
    low = [(q & 15) | (high >> j & 1) << 4 for j, q in enumerate(quants)]
    top = [(q >> 4) | (high >> (j + 16) & 1) << 4 for j, q in enumerate(quants)]
    return [(q - offset) * d + m for q in low + top]


def six_bits(j, s):
    """Scale and minimum of group j of Q4_K and Q5_K."""
    if j < 4:
        return s[j] & 63, s[j + 4] & 63
    return s[j + 4] & 15 | s[j - 4] >> 6 << 4, s[j + 4] >> 4 | s[j] >> 6 << 4


def k_block(d, dmin, scales, high, quants):
    """Q4_K and Q5_K: 8 groups of 32; group g's fifth bits are bit g of `high`."""
    values = []
    for group in range(8):
        scale, minimum = six_bits(group, scales)
        for j in range(32):
            q = quants[32 * (group // 2) + j] >> 4 * (group % 2) & 15 | (high[j] >> group & 1) << 4
            values.append(d * scale * q - dmin * minimum)
    return values


def q6_block(low, high, scales, d):
    values = [0.0] * 256
    for n in range(2):
        ql, qh, sc = low[64 * n :], high[32 * n :], scales[8 * n :]
        for j in range(32):
            quants = (
                ql[j] & 15 | (qh[j] & 3) << 4,
                ql[j + 32] & 15 | (qh[j] >> 2 & 3) << 4,
                ql[j] >> 4 | (qh[j] >> 4 & 3) << 4,
                ql[j + 32] >> 4 | (qh[j] >> 6 & 3) << 4,
            )
            for part, q in enumerate(quants):
                scale = int.from_bytes(bytes([sc[j // 16 + 2 * part]]), "little", signed=True)
                values[128 * n + 32 * part + j] = d * scale * (q - 32)
    return values


# name: (id, block, bytes, offsets of the half-precision scales, the block's elements)
FORMATS = {
    "F32": (0, 1, 4, (), lambda b: struct.unpack("<f", b)),
    "F16": (1, 1, 2, (0,), lambda b: [half(b)]),
    "BF16": (30, 1, 2, (), lambda b: struct.unpack("<f", b"\0\0" + b)),
    "Q4_0": (2, 32, 18, (0,), lambda b: small_block(half(b[:2]), 0, 8, b[2:])),
    "Q4_1": (3, 32, 20, (0, 2), lambda b: small_block(half(b[:2]), half(b[2:4]), 0, b[4:])),
    "Q5_0": (6, 32, 22, (0,), lambda b: small_block(half(b[:2]), 0, 16, b[6:], int.from_bytes(b[2:6], "little"))),
    "Q5_1": (
        *(7, 32, 24, (0, 2)),
        lambda b: small_block(half(b[:2]), half(b[2:4]), 0, b[8:], int.from_bytes(b[4:8], "little")),
    ),
    "Q8_0": (8, 32, 34, (0,), lambda b: [half(b[:2]) * q for q in struct.unpack("32b", b[2:])]),
    "Q4_K": (12, 256, 144, (0, 2), lambda b: k_block(half(b[:2]), half(b[2:4]), b[4:16], bytes(32), b[16:])),
    "Q5_K": (13, 256, 176, (0, 2), lambda b: k_block(half(b[:2]), half(b[2:4]), b[4:16], b[16:48], b[48:])),
    "Q6_K": (14, 256, 210, (208,), lambda b: q6_block(b[:128], b[128:192], b[192:208], half(b[208:]))),
}
QUANTISED = [name for name in FORMATS if name.startswith("Q")]


def random_blocks(rng, name: str, count: int) -> bytes:
    """Blocks of random bytes around finite scales of both signs."""
    _, _, size, scales, _ = FORMATS[name]
    blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
    if name in ("F32", "BF16"):
        bits = rng.standard_normal(count).astype("<f4").view(np.uint8).reshape(count, 4)
        blocks = bits[:, 4 - size :]
    for at in scales:
        blocks[:, at : at + 2] = rng.normal(0, 0.1, count).astype("<f2").view(np.uint8).reshape(count, 2)
    return blocks.tobytes()


def expected(name: str, raw: bytes) -> np.ndarray:
    _, _, size, _, elements = FORMATS[name]
    return np.array([value for at in range(0, len(raw), size) for value in elements(raw[at : at + size])])
