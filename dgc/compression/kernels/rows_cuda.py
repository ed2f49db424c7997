"""The loops over rows of slots (:mod:`dgc.compression.wire`), compiled for CUDA with Triton.

Writing takes a launch for all groups of slots and one for the checksums. Reading takes four: checksums, how many bits
are set in each block of the high places, the places, the values. Nothing waits for the device. All that programs add up
is whole numbers, so no result depends on the order in which they run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgc.compression import sizes as wire_sizes
from dgc.compression import wire
from dgc.compression.wire import Entries, Rows

GROUP = tl.constexpr(wire_sizes.GROUP)
CHECKSUM_WORDS = tl.constexpr(wire_sizes.CHECKSUM_WORDS)
MIXER, TOP, WHOLE = tl.constexpr(wire.MIXER), tl.constexpr(wire.TOP), tl.constexpr(float(1 << wire.EXACT))
NONFINITE = tl.constexpr(wire.NONFINITE)
SUMMED = tl.constexpr(1024)  # words of a row that a program adds up
COUNTED = tl.constexpr(2048)  # bits of a row's high places that a program looks at
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


# -- numbers -----------------------------------------------------------------------------------------------------------

@triton.jit
def _power_of_two(exponent):
    """2^exponent as float64, from its bits."""
    biased = tl.minimum(tl.maximum(exponent.to(tl.int64), -1022), 1023) + 1023
    return (biased << 52).to(tl.float64, bitcast=True)


@triton.jit
def _divided(x, divisor):
    """The quotient rounded once. Of float32 plain division is off by a rounding or two, and that of tl.div_rn takes
    subnormal numbers for 0 where Triton is older; float64 has so many bits that rounding twice comes to the same.
    """
    return (x.to(tl.float64) / divisor.to(tl.float64)).to(x.dtype)


@triton.jit
def _root(x):
    """The nearest float32, for which the same holds."""
    return tl.sqrt(x.to(tl.float64)).to(tl.float32)


@triton.jit
def _truncated(x):
    """float32, with the fraction of a bfloat16, rounded towards 0."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _half_of(x):
    """The bits of such a bfloat16."""
    return (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16)


# -- values ------------------------------------------------------------------------------------------------------------

@triton.jit
def _mean(total, count, largest):
    """float32, of so many whole numbers, as :func:`_means` has them."""
    mean = total.to(tl.float64) / tl.maximum(count, 1).to(tl.float64) / WHOLE
    return (mean * largest.to(tl.float64)).to(tl.float32)


@triton.jit
def _means(size, there, largest, BITS: tl.constexpr):
    """The mean magnitude of a group, twice; or with two levels those of what is below it and of what is not."""
    unit = tl.where(largest > 0, largest, 1.0)
    parts = (_divided(size, unit) * WHOLE).to(tl.int64)  # cut off
    whole = tl.where(there, parts, 0)
    total, count = tl.sum(whole), tl.sum(there.to(tl.int64))
    above = there
    if BITS == 2:
        above = there & (whole * count >= total)
    upper, number = tl.sum(tl.where(above, whole, 0)), tl.sum(above.to(tl.int64))
    last = _mean(upper, number, largest)
    return tl.where(count > number, _mean(total - upper, count - number, largest), last), last


@triton.jit
def _scale_of(size, there, BITS: tl.constexpr):
    """The numbers a and d of a group of such magnitudes, float32."""
    largest = tl.max(tl.where(there, size, 0.0))
    least = tl.min(tl.where(there, size, float("inf")))
    if BITS <= 2:
        first, last = _means(size, there, largest, BITS)
    else:
        first, last = tl.where(tl.sum(there.to(tl.int32)) > 0, least, 0.0), largest
    if BITS > 1:
        first = tl.where(least == 0, 0.0, first)
    a = _truncated(_root(first))
    d = tl.zeros_like(a)
    if BITS > 1:
        d = _truncated(_divided(tl.maximum(_root(last) - a, 0.0), d + ((1 << (BITS - 1)) - 1)))
    return a, d


@triton.jit
def _level_of(size, a, d, BITS: tl.constexpr):
    """The level of each magnitude, int64."""
    distance = _divided(_root(size) - a, tl.where(d > 0, d, float("inf")))
    most = tl.full([], (1 << (BITS - 1)) - 1, tl.float32)
    level = tl.minimum(tl.maximum(distance + 0.5, 0.0), most).to(tl.int64)  # cut off, as they are not negative
    lowest = tl.where((a == 0) & (d > 0), 1, 0).to(tl.int64)  # level 0 is for zeros alone
    return tl.where(size > 0, tl.maximum(level, lowest), level)


@triton.jit
def _from_level(code, a, d, BITS: tl.constexpr):
    """What a sign and a level say, float32."""
    root = a + (code & ((1 << (BITS - 1)) - 1)).to(tl.float32) * d
    size = tl.minimum(root * root, LARGEST)
    return tl.where(((code >> (BITS - 1)) & 1) == 1, -size, size)


@triton.jit
def _from_word(code, exponent, most, BITS: tl.constexpr):
    """What a float16 or float32 times a power of two says, float64, at most ``most``; and whether it is finite."""
    if BITS == 16:
        word = code.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float64)
    else:
        word = code.to(tl.int32).to(tl.float32, bitcast=True).to(tl.float64)
    value = word * _power_of_two(exponent)
    return tl.minimum(tl.maximum(value, -most), most), tl.abs(word) < float("inf")


@triton.jit
def _most(like):
    """The largest number of a dtype, float64."""
    if like == tl.float32:
        return tl.full([], 3.4028234663852886e38, tl.float64)
    else:
        return tl.full([], 1.7976931348623157e308, tl.float64)


# -- writing -----------------------------------------------------------------------------------------------------------

@triton.jit
def _packed(codes, WIDTH: tl.constexpr, NUMBERS: tl.constexpr):
    """int32 (NUMBERS WIDTH / 32,): numbers of so many bits, one after the other."""
    each: tl.constexpr = 32 // WIDTH
    shifted = tl.reshape(codes, (NUMBERS // each, each)) << (tl.arange(0, each) * WIDTH)[None, :]
    return tl.sum(shifted, 1).to(tl.int32)


@triton.jit(do_not_specialize=["slots", "length", "scales", "values_at", "lower", "higher", "low"])
def _encode(values, places, used, fine, words, halves, sent, slots, length, scales, values_at, lower, higher, low,
            BITS: tl.constexpr, ALL: tl.constexpr):
    """One program a group: its scale, its values, its places, and what receivers will read."""
    group, r = tl.program_id(0), tl.program_id(1).to(tl.int64)
    good, held, here = tl.load(fine + r), tl.load(used + r), words + r * length
    if group == 0:
        tl.store(here, tl.where(good, 0, NONFINITE))
    j = tl.arange(0, GROUP)
    slot = group * GROUP + j
    there = (slot < held) & good
    x = tl.load(values + r * slots + slot, mask=there, other=0)
    numbers = halves + r * 2 * length + 2 * scales
    if BITS > 8:
        largest = tl.max(tl.abs(x)).to(tl.float64)
        field = ((largest.to(tl.int64, bitcast=True) >> 52) & 0x7FF).to(tl.int32)
        exponent = tl.where(largest > 0, tl.maximum(field - 1022 - TOP, -1022), 0)
        tl.store(numbers + group, exponent.to(tl.int16))
        scaled = (x.to(tl.float64) * _power_of_two(-exponent)).to(tl.float32)
        if BITS == 16:
            codes = scaled.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF
        else:
            codes = scaled.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        read, _finite = _from_word(codes, exponent, _most(x.dtype), BITS)
    else:
        size = tl.minimum(tl.abs(x).to(tl.float32), LARGEST)
        a, d = _scale_of(size, there, BITS)
        tl.store(numbers + 2 * group, _half_of(a))
        tl.store(numbers + 2 * group + 1, _half_of(d))
        codes = tl.where(there, _level_of(size, a, d, BITS) | ((x < 0).to(tl.int64) << (BITS - 1)), 0)
        read = _from_level(codes, a, d, BITS)
    tl.store(sent + r * slots + slot, tl.where(there, read.to(x.dtype), 0), mask=slot < slots)
    of_group: tl.constexpr = GROUP * BITS // 32
    w = values_at + group * of_group + tl.arange(0, of_group)
    tl.store(here + w, _packed(codes, BITS, GROUP), mask=w < lower)
    if not ALL:
        for c in range(low):  # 512 bits of the low places at a time
            i = c * GROUP + j
            of = group * GROUP + i // low
            whole = tl.load(places + r * slots + of, mask=(of < held) & good, other=0)
            word = lower + (group * low + c) * (GROUP // 32) + tl.arange(0, GROUP // 32)
            tl.store(here + word, _packed((whole >> (i % low)) & 1, 1, GROUP), mask=word < higher)
        place = tl.load(places + r * slots + slot, mask=there, other=0)
        at = (place >> low) + slot
        bit = tl.full([GROUP], 1, tl.int32) << (at & 31).to(tl.int32)
        tl.atomic_or(here + higher + (at >> 5), bit, mask=there, sem="relaxed")


@triton.jit(do_not_specialize=["length"])
def _digest(words, total, length):
    """One program for so many words of a row: adds its part to the row's checksum."""
    r = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * SUMMED + tl.arange(0, SUMMED)
    word = tl.load(words + r * length + i, mask=i < length - CHECKSUM_WORDS, other=0).to(tl.int64) & 0xFFFFFFFF
    mixed = (i + 1) * MIXER
    tl.atomic_add(total + r, tl.sum(word * ((mixed ^ (mixed >> 32)) | 1)), sem="relaxed")


# -- reading -----------------------------------------------------------------------------------------------------------

@triton.jit
def _bits(words, higher, checksum):
    """Which bits of a block of the high places are set, int32."""
    i = tl.arange(0, COUNTED)
    at = higher + tl.program_id(0) * (COUNTED // 32) + i // 32
    return (tl.load(words + at, mask=at < checksum, other=0) >> (i % 32)) & 1


@triton.jit(do_not_specialize=["length", "higher", "blocks"])
def _count(words, counts, length, higher, blocks):
    """One program a block of the high places: how many bits are set."""
    b, r = tl.program_id(0), tl.program_id(1).to(tl.int64)
    bits = _bits(words + r * length, higher, length - CHECKSUM_WORDS)
    tl.store(counts + r * blocks + b, tl.sum(bits).to(tl.int64))


@triton.jit(do_not_specialize=["length", "slots", "lower", "higher", "blocks", "low"])
def _places(words, ends, limits, places, flags, length, slots, lower, higher, blocks, low):
    """One program a block of the high places: reads its places, and marks a row with one that is too large.

    Args:
        ends: int64 (R, blocks), how many bits are set up to each block's end.
    """
    b, r = tl.program_id(0), tl.program_id(1).to(tl.int64)
    here = words + r * length
    bits = _bits(here, higher, length - CHECKSUM_WORDS)
    before = tl.load(ends + r * blocks + b) - tl.sum(bits)
    slot = before + tl.cumsum(bits, 0) - 1
    there = (bits == 1) & (slot < slots)
    at = slot * low
    word = lower + (at >> 5)
    first = tl.load(here + word, mask=there, other=0).to(tl.int64) & 0xFFFFFFFF
    second = tl.load(here + word + 1, mask=there, other=0).to(tl.int64) & 0x7FFFFFFF  # l is at most 16
    below = ((first | (second << 32)) >> (at & 31)) & ((tl.full([], 1, tl.int64) << low) - 1)
    high = b.to(tl.int64) * COUNTED + tl.arange(0, COUNTED) - slot
    place = (high << low) | below
    tl.store(places + r * slots + slot, place, mask=there)
    if tl.sum((there & (place >= tl.load(limits + r))).to(tl.int32)) > 0:
        tl.store(flags + r, 1)


@triton.jit(do_not_specialize=["length", "slots", "scales", "values_at"])
def _values(words, halves, used, values, flags, length, slots, scales, values_at, BITS: tl.constexpr):
    """One program a group: reads its values, and marks a row with one that is not a number."""
    group, r = tl.program_id(0), tl.program_id(1).to(tl.int64)
    here, numbers = words + r * length, halves + r * 2 * length + 2 * scales
    slot = group * GROUP + tl.arange(0, GROUP)
    there = slot < tl.minimum(tl.load(used + r), slots)
    each: tl.constexpr = 32 // BITS
    code = tl.load(here + values_at + slot // each, mask=there, other=0) >> (slot % each * BITS)
    if BITS > 8:
        exponent = tl.load(numbers + group).to(tl.int32)
        read, finite = _from_word(code, exponent, _most(values.dtype.element_ty), BITS)
        wrong = tl.sum((there & ~finite).to(tl.int32))
    else:
        a = (tl.load(numbers + 2 * group).to(tl.int32) << 16).to(tl.float32, bitcast=True)
        d = (tl.load(numbers + 2 * group + 1).to(tl.int32) << 16).to(tl.float32, bitcast=True)
        read = _from_level(code, a, d, BITS)
        fine = (a >= 0) & (a < float("inf")) & (d >= 0) & (d < float("inf"))
        wrong = tl.where(fine, 0, tl.sum(there.to(tl.int32)))
    tl.store(values + r * slots + slot, read.to(values.dtype.element_ty), mask=slot < slots)
    if wrong > 0:
        tl.store(flags + r, 1)


# -- the doors ---------------------------------------------------------------------------------------------------------

def write(rows: Rows, row: Tensor, places: Tensor, values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As :meth:`dgc.compression.wire.Rows.encode`."""
    where = rows.slots_of(row, count)
    used = row.new_zeros(count + 1).scatter_add_(0, row, torch.ones_like(row))[:count]
    message, sent = _written(rows, rows.placed(values, where, count), rows.placed(places, where, count), used)
    return message, rows.taken_from(sent, where)


def write_all(rows: Rows, values: Tensor) -> Tensor:
    """As :meth:`dgc.compression.wire.Rows.encode_all`."""
    used = torch.full((len(values),), rows.slots, device=values.device)
    message, sent = _written(rows, values, used, used)
    values -= sent
    return message


def _written(rows: Rows, values: Tensor, places: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """A message of these slots, (R, k), of which each row uses the first; and what receivers will read, (R, k)."""
    scales, values_at, lower, higher, checksum = (end // 4 for end in rows.ends)
    values, length = values.contiguous(), rows.nbytes // 4
    words = torch.zeros(len(values), length, dtype=torch.int32, device=values.device)
    sent, fine = torch.empty_like(values), values.isfinite().all(1)
    with torch.cuda.device_of(values):
        if rows.groups:
            _encode[(rows.groups, len(values))](
                values, places, used, fine, words, words.view(torch.int16), sent, rows.slots, length, scales,
                values_at, lower, higher, rows.low, BITS=rows.bits, ALL=rows.all_entries, enable_fp_fusion=False)
        words[:, checksum:] = _checksums(words)
    return words.view(torch.uint8), sent


def _checksums(words: Tensor) -> Tensor:
    """As :func:`dgc.compression.wire.checksums`, of int32 (R, W)."""
    total = torch.zeros(len(words), 1, dtype=torch.int64, device=words.device)
    _digest[(triton.cdiv(words.shape[1], SUMMED.value), len(words))](words, total, words.shape[1])
    return total.view(torch.int32)


def read(rows: Rows, message: Tensor, sizes: Tensor | None = None) -> Entries:
    """As :meth:`dgc.compression.wire.Rows.decode`."""
    rows.check_size(message)
    words = message.contiguous().view(torch.int32)
    count, length, device = *words.shape, words.device
    scales, values_at, lower, higher, checksum = (end // 4 for end in rows.ends)
    flags = torch.zeros(count, dtype=torch.int32, device=device)
    values = torch.empty(count, rows.slots, dtype=rows.dtype, device=device)
    with torch.cuda.device_of(words):
        bad = (_checksums(words) != words[:, checksum:]).any(1)
        if rows.all_entries:
            places = torch.arange(rows.slots, device=device).expand(count, -1)
            used = torch.full((count,), rows.slots, device=device)
        else:
            blocks = triton.cdiv(checksum - higher, COUNTED.value // 32)
            ends = torch.zeros(count, blocks, dtype=torch.int64, device=device)
            _count[(blocks, count)](words, ends, length, higher, blocks)
            ends, places = ends.cumsum(1), torch.zeros(count, rows.slots, dtype=torch.int64, device=device)
            limits = torch.full((count,), rows.size, device=device)
            limits = limits if sizes is None else torch.minimum(limits, sizes)
            _places[(blocks, count)](words, ends, limits, places, flags, length, rows.slots, lower, higher, blocks,
                                     rows.low)
            used = ends[:, -1].contiguous()
        if rows.groups:
            _values[(rows.groups, count)](words, words.view(torch.int16), used, values, flags, length, rows.slots,
                                          scales, values_at, BITS=rows.bits, enable_fp_fusion=False)
    status = words[:, 0].to(torch.int64)
    bad |= (status < wire.NONFINITE) | (status > count)
    bad |= (status == 0) & ((flags != 0) | (used > rows.slots))
    status = torch.where(bad, 1 + torch.arange(count, device=device), status)
    valid = (torch.arange(rows.slots, device=device) < used[:, None]) & (status == 0)[:, None]
    return Entries(status, torch.where(valid, places, 0), torch.where(valid, values, 0))
