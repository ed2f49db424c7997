"""A row of the wire format, bit by bit, in Python's integers and floats: a transcription of what the docstring of
``dgc.compression.wire`` says, and of nothing else.
"""

import math
import struct

GROUP = 512
LARGEST = (2 - 2.0**-23) * 2.0**127  # of float32


def single(x):
    """The nearest float32, or the largest."""
    return (
        math.copysign(LARGEST, x)
        if abs(x) > LARGEST
        else struct.unpack("<f", struct.pack("<f", x))[0]
    )


def half(x):
    return struct.unpack("<e", struct.pack("<e", x))[0]


def cut(x):
    """A float32 with the fraction of a bfloat16, and its 16 bits."""
    word = struct.unpack("<I", struct.pack("<f", x))[0] >> 16
    return struct.unpack("<f", struct.pack("<I", word << 16))[0], word


def shape(k, n, b, all_entries):
    """The low bits of a place, and the bits of the five sections before the checksum."""
    low = max(0, min(16, math.floor(math.log2(n / k))))
    scales = 16 * -(-k // GROUP) * (1 if b > 8 else 2)
    places = [0, 0] if all_entries else [k * low, k + ((n - 1) >> low)]
    return low, [32, scales, k * b, *places]


def join(sections):
    """Sections, each an integer and how many bits it has, one after the other."""
    return b"".join(number.to_bytes(4 * -(-bits // 32), "little") for number, bits in sections)


def packed(numbers, width):
    return sum(number << width * i for i, number in enumerate(numbers))


def checksum(body):
    total = 0
    for i, word in enumerate(struct.unpack(f"<{len(body) // 4}I", body), 1):
        m = i * 0x61C88647
        total += word * ((m ^ (m >> 32)) | 1)
    return (total % 2**64).to_bytes(8, "little")


def levels_of(sizes, b):
    """The first and the last level of magnitudes."""
    smallest, largest = min(sizes), max(sizes)
    if b > 2 or largest == 0:
        return smallest, largest
    whole = [math.floor(single(single(x / largest) * 2.0**24)) for x in sizes]
    upper = [w for w in whole if b == 1 or w * len(whole) >= sum(whole)]
    lower = [w for w in whole if b == 2 and w * len(whole) < sum(whole)]
    last, first = (
        single(sum(part) / max(1, len(part)) / 2.0**24 * largest) for part in (upper, lower)
    )
    first = first if lower else last
    return (0.0 if smallest == 0 and b > 1 else first), last


def encode_group(values, b):
    """The scale's bits and the codes of a group's values."""
    if b > 8:
        largest = max(abs(x) for x in values)
        e = max(math.frexp(largest)[1] - 15, -1022) if largest else 0
        scaled = [single(x * 2.0**-e) for x in values]
        kind = ("<f", "<I") if b == 32 else ("<e", "<H")
        return e & 0xFFFF, [struct.unpack(kind[1], struct.pack(kind[0], x))[0] for x in scaled]
    sizes = [single(abs(x)) for x in values]
    first, last = levels_of(sizes, b)
    top = 2 ** (b - 1) - 1
    a, a_bits = cut(single(math.sqrt(first)))
    d, d_bits = (
        cut(single(single(max(0.0, single(math.sqrt(last)) - a)) / top)) if top else (0.0, 0)
    )
    codes = []
    for x, size in zip(values, sizes, strict=True):
        j = math.floor(single(single(single(single(math.sqrt(size)) - a) / d) + 0.5)) if d else 0
        least = 1 if d and a == 0 and size > 0 else 0
        codes.append(min(max(j, least), top) | (x < 0) << (b - 1))
    return a_bits | d_bits << 16, codes


def encode(k, n, b, places, values, all_entries=False):
    """A row's bytes."""
    low, bits = shape(k, n, b, all_entries)
    if not all(math.isfinite(x) for x in values):
        body = join(zip([2**32 - 1, 0, 0, 0, 0], bits, strict=True))
        return body + checksum(body)
    scales, codes = [], []
    for first in range(0, len(values), GROUP):
        scale, some = encode_group(values[first : first + GROUP], b)
        scales.append(scale)
        codes += some
    numbers = [0, packed(scales, 16 if b > 8 else 32), packed(codes, b), 0, 0]
    if not all_entries:
        numbers[3] = packed([place & (1 << low) - 1 for place in places], low)
        numbers[4] = sum(1 << (place >> low) + slot for slot, place in enumerate(places))
    body = join(zip(numbers, bits, strict=True))
    return body + checksum(body)


def value(code, scale, b):
    if b > 8:
        kind = ("<f", "<I") if b == 32 else ("<e", "<H")
        e = scale - 0x10000 if scale & 0x8000 else scale
        return struct.unpack(kind[0], struct.pack(kind[1], code))[0] * 2.0**e
    a, d = (
        struct.unpack("<f", struct.pack("<I", x << 16))[0] for x in (scale & 0xFFFF, scale >> 16)
    )
    root = single(a + single((code & 2 ** (b - 1) - 1) * d))
    size = single(root * root)
    return -size if code >> (b - 1) else size


def decode(row, k, n, b, all_entries=False):
    """The status of a row, its places and its values, as float64."""
    low, bits = shape(k, n, b, all_entries)
    assert checksum(row[:-8]) == row[-8:]
    numbers, at = [], 0
    for length in bits:
        end = at + 4 * -(-length // 32)
        numbers.append(int.from_bytes(row[at:end], "little"))
        at = end
    assert at + 8 == len(row)
    status = numbers[0] - 2**32 if numbers[0] >> 31 else numbers[0]
    if status:
        return status, [], []
    places = list(range(n)) if all_entries else []
    for at in range(0 if all_entries else bits[4]):
        if numbers[4] >> at & 1:
            slot = len(places)
            places.append(at - slot << low | numbers[3] >> slot * low & (1 << low) - 1)
    width = 16 if b > 8 else 32
    values = [
        value(
            numbers[2] >> slot * b & (1 << b) - 1,
            numbers[1] >> slot // GROUP * width & (1 << width) - 1,
            b,
        )
        for slot in range(len(places))
    ]
    return 0, places, values
