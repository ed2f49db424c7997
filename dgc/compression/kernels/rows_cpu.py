"""The loops over rows of slots (:mod:`dgc.compression.wire`), compiled for the CPU with numba."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dgc.compression.kernels.jit import jit
from dgc.compression.kernels.numba_tools import (
    PREFETCH_DISTANCE,
    in_threads,
    lowest,
    prefetch,
    thread_ranges,
)
from dgc.compression.sizes import CHECKSUM_WORDS, GROUP, LINE
from dgc.compression.wire import EXACT, MIXER, NONFINITE, TOP, Rows

GROUPS_PER_THREAD = 128  # groups of slots that are worth another thread
REBIAS = np.uint32(112 << 23)  # from float16's exponent to float32's
LEAST = 2.0**-14  # the least float16 with a leading 1
LARGEST = np.finfo(np.float32).max
ONE, HALF = np.float32(1), np.float32(0.5)
WHOLE = np.float32(1 << EXACT)
# What a loop is told of the format of rows: k, b, l, whether all entries travel, and the words at which sections begin.
SLOTS, BITS, LOW, ALL, SCALES, VALUES, LOWER, HIGHER, CHECKSUM = range(9)

_jit = jit(nogil=True, error_model="numpy", boundscheck=False)


# -- bits --------------------------------------------------------------------------------------------------------------

@_jit
def _put(words, at, codes, count, width):
    """Writes numbers of so many bits one after the other, from the word ``at`` on."""
    held, filled = np.uint64(0), 0
    for j in range(count):
        held |= np.uint64(codes[j]) << np.uint64(filled)
        filled += width
        if filled >= 32:
            words[at] = np.uint32(held & np.uint64(0xFFFFFFFF))
            held >>= np.uint64(32)
            filled -= 32
            at += 1
    if filled:
        words[at] = np.uint32(held)


@_jit
def _halves(values, count, power, single, bits, codes):
    """The float16 numbers that are nearest to values times a power of two, ties to even."""
    for j in range(count):
        single[j] = values[j] * power
    for j in range(count):
        codes[j] = bits[j] >> np.uint32(16) & np.uint32(0x8000)  # the sign
        bits[j] &= np.uint32(0x7FFFFFFF)
    for j in range(count):
        if bits[j] >= np.uint32(0x38800000):
            even = bits[j] >> np.uint32(13) & np.uint32(1)
            codes[j] |= (bits[j] + np.uint32(0xFFF) + even - REBIAS) >> np.uint32(13)
        else:  # below 2^-14: a multiple of 2^-24, as the floats next to 1/2 are
            single[j] += HALF
            codes[j] |= bits[j] - np.uint32(0x3F000000)


@_jit
def _from_halves(codes, count, power, single, bits, values):
    """What float16 numbers times a power of two say. Returns whether all of them are finite."""
    most = np.float64(np.finfo(values.dtype).max)
    largest = np.uint32(0)
    for j in range(count):
        magnitude = np.uint32(codes[j]) & np.uint32(0x7FFF)
        largest = max(largest, magnitude)
        below = magnitude < np.uint32(0x400)  # so small that a float16 has no leading 1
        bits[j] = (magnitude << np.uint32(13)) + REBIAS + (np.uint32(1 << 23) if below else np.uint32(0))
    for j in range(count):
        x = np.float64(single[j])
        x -= LEAST if np.uint32(codes[j]) & np.uint32(0x7FFF) < np.uint32(0x400) else 0.0
        x = min(x * power, most)
        values[j] = -x if codes[j] & 0x8000 else x
    return largest < np.uint32(0x7C00)


@_jit
def _from_singles(codes, count, power, single, bits, values):
    """As :func:`_from_halves`, of float32."""
    most, fine = np.float64(np.finfo(values.dtype).max), True
    for j in range(count):
        bits[j] = np.uint32(codes[j])
        fine &= abs(single[j]) < np.inf
        values[j] = min(max(np.float64(single[j]) * power, -most), most)
    return fine


@_jit
def _level(code, width, a, d):
    """What a sign and a level say."""
    root = a + np.float32(code & (1 << width - 1) - 1) * d
    x = min(root * root, LARGEST)
    return -x if code >> width - 1 & 1 else x


@_jit
def _power(exponent):
    return math.ldexp(1.0, min(max(exponent, -1022), 1023))


# -- values ------------------------------------------------------------------------------------------------------------

@_jit
def _mean(total, count, largest):
    return np.float32(np.float64(total) / max(count, 1) / (1 << EXACT) * np.float64(largest))


@_jit
def _means(sizes, count, largest, levels):
    """The mean magnitude, twice; or with two levels those of what is below it and of what is not."""
    unit = largest if largest > 0 else ONE
    total, upper, number = 0, 0, 0
    for j in range(count):
        total += np.int64(np.floor(sizes[j] / unit * WHOLE))
    for j in range(count):
        whole = np.int64(np.floor(sizes[j] / unit * WHOLE))
        if levels == 1 or whole * count >= total:
            upper += whole
            number += 1
    last = _mean(upper, number, largest)
    return (_mean(total - upper, count - number, largest) if count > number else last), last


@_jit
def _truncated(x, single, bits):
    single[0] = x
    bits[0] &= np.uint32(0xFFFF0000)
    return single[0]


@_jit
def _code(x, count, width, words, form, group, codes, sent, sizes, single, bits):
    """Codes a group's values x, writes down its scale, and what receivers will read to ``sent``."""
    numbers = words[form[SCALES]:].view(np.uint16)
    if width > 8:
        largest = x.dtype.type(0)
        for j in range(count):
            largest = max(largest, abs(x[j]))
        exponent = max(math.frexp(np.float64(largest))[1] - TOP, -1022) if largest > 0 else 0
        up, down = _power(-exponent), _power(exponent)
        numbers[group] = exponent
        if width == 16:
            _halves(x, count, up, single, bits, codes)
            _from_halves(codes, count, down, single, bits, sent)
            return
        for j in range(count):
            single[j] = x[j] * up
            codes[j] = np.int64(bits[j])
        _from_singles(codes, count, down, single, bits, sent)
        return
    levels, largest, least = 1 << width - 1, np.float32(0), np.float32(np.inf)
    for j in range(count):
        sizes[j] = min(np.float32(abs(x[j])), LARGEST)
        largest, least = max(largest, sizes[j]), min(least, sizes[j])
    first, last = least, largest
    if levels <= 2:
        first, last = _means(sizes, count, largest, levels)
    if least == 0 and levels > 1:
        first = np.float32(0)
    a, d = _truncated(np.sqrt(first), single, bits), np.float32(0)
    if levels > 1:
        d = _truncated(max(np.sqrt(last) - a, np.float32(0)) / np.float32(levels - 1), single, bits)
    single[0], single[1] = a, d
    numbers[2 * group], numbers[2 * group + 1] = bits[0] >> np.uint32(16), bits[1] >> np.uint32(16)
    over = d if d > 0 else np.float32(np.inf)
    for j in range(count):
        level = np.int64(np.floor((np.sqrt(sizes[j]) - a) / over + HALF))
        level = min(max(level, 0), levels - 1)
        if level == 0 and a == 0 and d > 0 and sizes[j] > 0:
            level = 1
        codes[j] = level | (x[j] < 0) << width - 1
        sent[j] = x.dtype.type(_level(codes[j], width, a, d))


@_jit
def _place(i, n):
    """Where an entry of the bucket is in its owner's region, of n (:class:`dgc.compression.regions.Regions`)."""
    return i // (LINE * n) * LINE + i % LINE


@_jit
def encode(first, last, begins, groups, places, n, u, v, masking, form, words, wrong, sent):
    """Groups first to last of all rows: takes their entries out of v and writes them down, but for the high bits of
    places. Row r has the entries ``places[begins[r]:begins[r + 1]]``, in n owners' regions, and groups from
    ``groups[r]`` on. Returns how many were sent. A row with ``wrong`` has nothing.
    """
    codes, lows, x = np.empty(GROUP, np.int64), np.empty(GROUP, np.int64), np.empty(GROUP, v.dtype)
    sizes, single = np.empty(GROUP, np.float32), np.empty(GROUP, np.float32)
    bits, count, width, low = single.view(np.uint32), 0, form[BITS], form[LOW]
    for r in range(len(wrong)):
        for t in range(max(first, groups[r]), min(last, groups[r + 1])):
            group = t - groups[r]
            begin = begins[r] + group * GROUP
            m = min(GROUP, begins[r + 1] - begin)
            if wrong[r]:
                sent[begin:begin + m] = 0
                continue
            for j in range(m):
                x[j] = v[places[begin + j]]
            out = sent[begin:begin + m]
            _code(x, m, width, words[r], form, group, codes, out, sizes, single, bits)
            _put(words[r], form[VALUES] + group * (GROUP * width >> 5), codes, m, width)
            for j in range(m):
                i = places[begin + j]
                v[i] -= out[j]
                if out[j] != 0:
                    count += 1
                    if masking:
                        u[i] = 0
                lows[j] = _place(i, n) & (1 << low) - 1
            if low:
                _put(words[r], form[LOWER] + group * (GROUP * low >> 5), lows, m, low)
    return count


@_jit
def fetch(first, last, begins, groups, places, u, v, masking, wrong):
    """Finds the rows of which an entry is not finite; and has the entries of the groups in the cache."""
    for r in range(len(wrong)):
        a, b = max(first, groups[r]), min(last, groups[r + 1])
        begin, end = begins[r] + (a - groups[r]) * GROUP, min(begins[r + 1], begins[r] + (b - groups[r]) * GROUP)
        for j in range(begin, end):
            if j + PREFETCH_DISTANCE < end:
                prefetch(v.ctypes.data + places[j + PREFETCH_DISTANCE] * v.itemsize)
                if masking:
                    prefetch(u.ctypes.data + places[j + PREFETCH_DISTANCE] * v.itemsize)
            if not abs(v[places[j]]) < np.inf:
                wrong[r] = True


@_jit
def close(first, last, begins, places, n, form, words, wrong):
    """Rows first to last: writes the high bits of places, the status and the checksum."""
    for r in range(first, last):
        if wrong[r]:
            words[r, 0] = np.uint32(0xFFFFFFFF)
        elif not form[ALL]:
            for j in range(begins[r], begins[r + 1]):
                at = (_place(places[j], n) >> form[LOW]) + j - begins[r]
                words[r, form[HIGHER] + (at >> 5)] |= np.uint32(1) << np.uint32(at & 31)
        total = _checksum(words[r])
        words[r, -2], words[r, -1] = np.uint32(total & 0xFFFFFFFF), np.uint32(total >> 32 & 0xFFFFFFFF)


@_jit
def _checksum(words):
    """The checksum of :func:`dgc.compression.wire.seal`: of all words but the last ones, which hold it."""
    total = np.int64(0)
    for i in range(len(words) - CHECKSUM_WORDS):
        mixed = np.int64(i + 1) * MIXER
        total += np.int64(words[i]) * (mixed ^ mixed >> 32 | 1)
    return total


@_jit
def decode(first, last, form, words, sizes, status, used, places, values):
    """Rows first to last: their status, how many slots they use, and the entries in these."""
    for r in range(first, last):
        digest, row = _checksum(words[r]), words[r]
        used[r], status[r] = 0, np.int64(np.int32(row[0]))
        bad = row[-2] != np.uint32(digest & 0xFFFFFFFF) or row[-1] != np.uint32(digest >> 32 & 0xFFFFFFFF)
        bad |= status[r] < -1 or status[r] > len(words)
        if status[r] == 0 and not bad:
            count = form[SLOTS] if form[ALL] else _places(form, row, sizes[min(r, len(sizes) - 1)], places[r])
            bad = count < 0 or not _values(form, row, count, values[r])
            used[r] = count
        if bad:
            status[r], used[r] = 1 + r, 0


@_jit
def _places(form, row, size, places):
    """Reads the places of a row. Returns how many there are, or -1 if one is wrong."""
    low, count, most = form[LOW], 0, np.int64(-1)
    at, held, filled, mask = form[LOWER], np.uint64(0), 0, np.uint64((1 << low) - 1)
    for w in range(form[HIGHER], form[CHECKSUM]):
        word, base = np.int64(row[w]), 32 * (w - form[HIGHER])
        while word:
            if count == len(places):
                return -1
            place = base + lowest(word) - count << low
            word &= word - 1
            if filled < low:
                held |= np.uint64(row[at]) << np.uint64(filled)
                at += 1
                filled += 32
            place |= np.int64(held & mask)
            held >>= np.uint64(low)
            filled -= low
            most = max(most, place)
            places[count] = place
            count += 1
    return count if most < size else -1


@_jit
def _values(form, row, count, values):
    """Reads so many values of a row. Returns whether all of them are what a row may have."""
    single, table, width, fine = np.empty(GROUP, np.float32), np.empty(16, values.dtype), form[BITS], True
    bits, codes, numbers = single.view(np.uint32), row[form[VALUES]:], row[form[SCALES]:].view(np.uint16)
    if width > 8:
        for group in range(-(-count // GROUP)):
            first, power = group * GROUP, _power(np.int64(np.int16(numbers[group])))
            m, part = min(GROUP, count - first), values[first:]
            if width == 16:
                fine &= _from_halves(codes.view(np.uint16)[first:], m, power, single, bits, part)
            else:
                fine &= _from_singles(codes[first:], m, power, single, bits, part)
        return fine
    at, held, filled, mask = 0, np.uint64(0), 0, np.uint64((1 << width) - 1)
    for group in range(-(-count // GROUP)):
        for i in range(2):
            bits[i] = np.uint32(numbers[2 * group + i]) << np.uint32(16)
        a, d = single[0], single[1]
        fine &= 0 <= a < np.inf and 0 <= d < np.inf
        for code in range(1 << width if width <= 4 else 0):
            table[code] = _level(code, width, a, d)
        for j in range(group * GROUP, min(count, group * GROUP + GROUP)):
            if filled < width:
                held |= np.uint64(codes[at]) << np.uint64(filled)
                at += 1
                filled += 32
            code = np.int64(held & mask)
            held >>= np.uint64(width)
            filled -= width
            values[j] = table[code] if width <= 4 else _level(code, width, a, d)
    return fine


@_jit
def encode_all(first, last, form, x, words, wrong):
    """Groups first to last of rows of all entries x: writes them down, and leaves what rounding drops."""
    codes, sent = np.empty(GROUP, np.int64), np.empty(GROUP, x.dtype)
    sizes, single = np.empty(GROUP, np.float32), np.empty(GROUP, np.float32)
    bits, width, groups = single.view(np.uint32), form[BITS], -(-x.shape[1] // GROUP)
    for t in range(first, last):
        r, group = t // groups, t % groups
        if wrong[r]:
            continue
        part = x[r, group * GROUP:min(x.shape[1], group * GROUP + GROUP)]
        _code(part, len(part), width, words[r], form, group, codes, sent, sizes, single, bits)
        _put(words[r], form[VALUES] + group * (GROUP * width >> 5), codes, len(part), width)
        for j in range(len(part)):
            part[j] -= sent[j]


@_jit
def find_wrong(first, last, x, wrong):
    """Rows first to last: whether one of their values is not finite."""
    for r in range(first, last):
        fine = True
        for value in x[r]:
            fine &= abs(value) < np.inf
        wrong[r] = not fine


# -- the doors ---------------------------------------------------------------------------------------------------------

def form_of(rows: Rows) -> Any:
    """What the loops are told of a format."""
    ends = [end // 4 for end in rows.ends]
    return np.array([rows.slots, rows.bits, rows.low, rows.all_entries, *ends], np.int64)


def written(rows: Rows, begins: Any, places: Any, n: int, u: Any, v: Any, masking: bool) -> tuple[Tensor, Any, int]:
    """A message of rows of entries, which are taken out of v; what receivers will read, and how many are not zero.

    Args:
        begins: int64 (R + 1,): row r has ``places[begins[r]:begins[r + 1]]``.
        places: int64, in the bucket, ascending in each row.
        n: owners.
    """
    count, threads, form = len(begins) - 1, torch.get_num_threads(), form_of(rows)
    words, wrong = np.zeros((count, rows.nbytes // 4), np.uint32), np.zeros(count, np.bool_)
    groups = np.concatenate([[0], np.cumsum(-(-np.diff(begins) // GROUP))])
    sent = np.empty(begins[-1], v.dtype)
    parts = thread_ranges(int(groups[-1]), min(threads, 1 + int(groups[-1]) // GROUPS_PER_THREAD))
    in_threads(lambda a, b: fetch(a, b, begins, groups, places, u, v, masking, wrong), parts, threads)
    entries = sum(in_threads(lambda a, b: encode(
        a, b, begins, groups, places, n, u, v, masking, form, words, wrong, sent), parts, threads))
    in_threads(lambda a, b: close(a, b, begins, places, n, form, words, wrong), thread_ranges(count, threads), threads)
    return torch.from_numpy(words.view(np.uint8)), sent, entries


def read(rows: Rows, messages: Tensor, sizes: Any, dtype: Any) -> tuple[Any, Any, Any, Any]:
    """What rows say: status (R,), used (R,), places (R, k) and values (R, k), where slots are used."""
    rows.check_size(messages)
    words, threads = messages.contiguous().numpy().view(np.uint32), torch.get_num_threads()
    status, used = np.empty((2, len(words)), np.int64)
    places = np.empty((len(words), 0 if rows.all_entries else rows.slots), np.int32)
    values = np.empty((len(words), rows.slots), dtype)
    form = form_of(rows)
    in_threads(lambda a, b: decode(a, b, form, words, sizes, status, used, places, values),
               thread_ranges(len(words), threads), threads)
    return status, used, places, values


def write_all(rows: Rows, values: Tensor) -> Tensor:
    """As :meth:`dgc.compression.wire.Rows.encode_all`."""
    x, threads, form = values.numpy(), torch.get_num_threads(), form_of(rows)
    words, wrong = np.zeros((len(x), rows.nbytes // 4), np.uint32), np.empty(len(x), np.bool_)
    in_threads(lambda a, b: find_wrong(a, b, x, wrong), thread_ranges(len(x), threads), threads)
    total, nothing = len(x) * rows.groups, np.zeros(len(x) + 1, np.int64)
    in_threads(lambda a, b: encode_all(a, b, form, x, words, wrong),
               thread_ranges(total, min(threads, 1 + total // GROUPS_PER_THREAD)), threads)
    in_threads(lambda a, b: close(a, b, nothing, nothing, 1, form, words, wrong),
               thread_ranges(len(x), threads), threads)
    return torch.from_numpy(words.view(np.uint8))


assert NONFINITE == -1  # as close() writes it, and decode() reads it
