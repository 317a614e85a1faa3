"""Numbers from text: whole buffers of lines at once, compiled by numba, without the GIL.

Every kernel takes ``text``, uint8 [bytes], whose last byte ends a line, and ``skip``: whether it
continues after a wrong line, or stops there.  It returns the number of right lines, the number of
wrong lines, and of the first wrong one the number from 0 (-1: there is none), the offsets of its
begin and end, and the place of its first wrong field.

[Note: exact numbers]  A float is read as ``float(text)`` reads it, to the bit.  Where its digits
are a whole number below 2 ** 53 and its power of ten is at most 22, both are exact in double, and
one multiplication or division rounds once.  Others are rare: kernels note their places in ``hard``,
int64 [1 + floats], whose first element counts them, and Python reads them.  Until then the place of
number n of them has the bits of the whole number -n, a nan that no other float has.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pserver.table.kernels import kernel
from trainer.data.batches import Array

TAB, NEWLINE, RETURN, SPACE, QUOTE, POINT = 9, 10, 13, 32, 34, 46
PLUS, MINUS, ZERO = 43, 45, 48
NUMBERS, CATEGORIES = 13, 26
CATEGORY_BITS = 32
MISSING = 2**CATEGORY_BITS  # above all categories of a slot: an id of its own
WRONG, EXACT, HARD = 0, 1, 2  # the state of a float: see [Note: exact numbers]

HEXADECIMAL = np.full(256, -1, np.int64)
for _digits in ("0123456789abcdef", "0123456789ABCDEF"):
    HEXADECIMAL[np.frombuffer(_digits.encode(), np.uint8)] = np.arange(16)
POWERS = 10.0 ** np.arange(23)
TENTH = np.uint64((2**64 - 1) // 10)  # a number above it has no room for another digit
FIVE, NINE, TEN = np.uint64(5), np.uint64(9), np.uint64(10)
LOWEST = np.uint64(2**63)  # without its sign

Result = tuple[int, int, int, int, int, int]


@kernel
def line_end(text: Array, at: int) -> int:
    """The offset of the end of the line at ``at``."""
    while text[at] != NEWLINE:
        at += 1
    return at


@kernel
def read_whole(text: Array, at: int) -> tuple[Any, int, Any]:
    """A whole number of 64 bits: itself, the offset after it, and whether it is one.

    From 2 ** 63 up to 2 ** 64 - 1 it becomes the negative number of the same bits.
    """
    negative = text[at] == MINUS
    if negative:
        at += 1
    first = at
    value = np.uint64(0)
    while True:
        digit = np.uint64(text[at]) - np.uint64(ZERO)
        if digit > NINE:
            break
        if value > TENTH or (value == TENTH and digit > FIVE):
            return 0, at, False
        value = value * TEN + digit
        at += 1
    if negative:
        right = at > first and value <= LOWEST
        return np.int64(np.uint64(0) - value), at, right
    return np.int64(value), at, at > first


@kernel
def read_word(text: Array, at: int) -> tuple[float, int, int]:
    """nan or inf, in any case, after the sign: see :func:`read_float`."""
    first, second, third = text[at] | 32, 0, 0
    if text[at] != NEWLINE and text[at + 1] != NEWLINE:
        second, third = text[at + 1] | 32, text[at + 2] | 32
    if first == 110 and second == 97 and third == 110:
        return np.nan, at + 3, EXACT
    if first == 105 and second == 110 and third == 102:
        return np.inf, at + 3, EXACT
    return 0.0, at, WRONG


@kernel
def read_float(text: Array, at: int) -> tuple[float, int, int]:
    """A float: itself, the offset after it, and its state."""
    sign = 1.0
    if text[at] == MINUS or text[at] == PLUS:
        sign = -1.0 if text[at] == MINUS else 1.0
        at += 1
    mantissa, digits, seen, power, fraction = np.int64(0), 0, 0, 0, False
    while True:
        byte = text[at]
        if byte == POINT and not fraction:
            fraction = True
        else:
            digit = np.int64(byte) - ZERO
            if digit < 0 or digit > 9:
                break
            seen += 1
            if mantissa or digit:
                digits += 1
            if digits <= 18:
                mantissa = mantissa * 10 + digit
            if fraction:
                power -= 1
        at += 1
    if not seen:
        value, at, state = read_word(text, at)
        return sign * value, at, WRONG if fraction else state
    if text[at] | 32 == 101:  # e
        at += 1
        exponent, at, right = read_whole(text, at + 1 if text[at] == PLUS else at)
        if not right:
            return 0.0, at, WRONG
        power += max(min(exponent, 9999), -9999)
    if digits > 18 or mantissa > 2**53 or power > 22 or power < -22:
        return 0.0, at, EXACT if not mantissa and digits <= 18 else HARD
    value = np.float64(mantissa)
    value = value * POWERS[power] if power >= 0 else value / POWERS[-power]
    return sign * value, at, EXACT


@kernel
def put_number(
    text: Array, at: int, is_float: bool, out: Array, place: int, hard: Array
) -> tuple[int, bool]:
    """A number at ``out[place]``, int64 or the bits of a float: the offset after it, and whether it
    is one.
    """
    if not is_float:
        value, after, right = read_whole(text, at)
        if right:
            out[place] = value
        return after, right
    real, after, state = read_float(text, at)
    if state == HARD:
        hard[0] += 1
        hard[hard[0]] = at
        out[place] = -hard[0]
    elif state == EXACT:
        out.view(np.float64)[place] = real
    return after, state != WRONG


@kernel
def criteo_fields(
    text: Array, at: int, row: int, labels: Array, numbers: Array, ids: Array
) -> tuple[int, int]:
    """One line of Criteo's format into ``row``: the offset after it, and the place of its first
    wrong field; -1 where all are right.
    """
    if (text[at] != ZERO and text[at] != ZERO + 1) or text[at + 1] != TAB:
        return at, 0
    labels[row] = text[at] - ZERO
    at += 2
    for column in range(NUMBERS):
        if text[at] == TAB:
            numbers[row, column] = 0
        else:
            value, at, right = read_whole(text, at)
            if not right or text[at] != TAB:
                return at, 1 + column
            numbers[row, column] = value
        at += 1
    for column in range(CATEGORIES):
        category, first = np.int64(0), at
        while True:
            digit = HEXADECIMAL[text[at]]
            if digit < 0:
                break
            category = category << 4 | digit
            at += 1
        if at - first > CATEGORY_BITS // 4:
            return at, 1 + NUMBERS + column
        if column < CATEGORIES - 1:
            if text[at] != TAB:
                return at, 1 + NUMBERS + column
        elif text[at] == RETURN:
            if text[at + 1] != NEWLINE:
                return at, 1 + NUMBERS + column
            at += 1
        elif text[at] != NEWLINE:
            return at, 1 + NUMBERS + column
        if at == first or (at == first + 1 and text[first] == RETURN):
            category = MISSING
        ids[row, column] = category + (column << (CATEGORY_BITS + 1))
        at += 1
    return at, -1


@kernel
def criteo_lines(text: Array, labels: Array, numbers: Array, ids: Array, skip: bool) -> Result:
    """Criteo's format; see the module's docstring."""
    at = row = line = wrong = 0
    first, begin, end, field = -1, 0, 0, -1
    while at < text.size:
        after, place = criteo_fields(text, at, row, labels, numbers, ids)
        if place < 0:
            row += 1
            at = after
        else:
            stop = line_end(text, at)
            if not wrong:
                first, begin, end, field = line, at, stop, place
            wrong += 1
            at = stop + 1
            if not skip:
                break
        line += 1
    return row, wrong, first, begin, end, field


@kernel
def skip_field(text: Array, at: int, delimiter: int) -> int:
    """The offset after an unused field; it may be quoted."""
    quoted = text[at] == QUOTE
    if quoted:
        at += 1
    while text[at] != NEWLINE and (quoted or text[at] != delimiter):
        if text[at] == QUOTE and quoted:
            if text[at + 1] == QUOTE:
                at += 1
            else:
                quoted = False
        at += 1
    return at


@kernel
def csv_fields(
    text: Array,
    at: int,
    delimiter: int,
    places: Array,
    floats: Array,
    fill: float,
    out: Array,
    hard: Array,
) -> tuple[int, int]:
    """One line of CSV into a row: the offset after it, and its first wrong field or -1; see
    :func:`csv_lines`.
    """
    for column in range(places.size):
        place, right = places[column], True
        if place < 0:
            at = skip_field(text, at, delimiter)
        elif text[at] == delimiter or text[at] == NEWLINE or text[at] == RETURN:
            right = fill == fill
            if floats[place]:
                out.view(np.float64)[place] = fill
            elif right:
                out[place] = np.int64(fill)
        else:
            at, right = put_number(text, at, floats[place], out, place, hard)
        if text[at] == RETURN and text[at + 1] == NEWLINE:
            at += 1
        last = column == places.size - 1
        if not right or text[at] != (NEWLINE if last else delimiter):
            return at, column
        at += 1
    return at, -1


@kernel
def csv_lines(
    text: Array,
    delimiter: int,
    places: Array,
    floats: Array,
    fill: float,
    out: Array,
    hard: Array,
    skip: bool,
) -> Result:
    """CSV; see the module's docstring.

    Args:
        places: int64 [columns]: which number of a row a column is; -1: none.
        floats: uint8 [numbers]: which of them are floats.
        fill: what an empty field is; nan: wrong.
        out: int64 [lines, numbers], written; floats by their bits.
    """
    at = row = line = wrong = 0
    first, begin, end, field = -1, 0, 0, -1
    while at < text.size:
        after, place = csv_fields(text, at, delimiter, places, floats, fill, out[row], hard)
        if place < 0:
            row, at = row + 1, after
        else:
            stop = line_end(text, at)
            if not wrong:
                first, begin, end, field = line, at, stop, place
            wrong += 1
            at = stop + 1
            if not skip:
                break
        line += 1
    return row, wrong, first, begin, end, field


@kernel
def after_spaces(text: Array, at: int) -> int:
    """The offset of the next word, or of the line's end."""
    while text[at] == SPACE or text[at] == TAB or text[at] == RETURN:
        at += 1
    return at


@kernel
def ends_word(byte: int) -> bool:
    """Whether a word ends before this byte."""
    return byte == SPACE or byte == TAB or byte == RETURN or byte == NEWLINE


@kernel
def multislot_slot(
    text: Array, at: int, is_float: bool, width: int, out: Array, place: int, hard: Array
) -> tuple[int, int]:
    """One slot of a line, its values from ``place`` on: the offset after it, and the number of its
    values; -1: it is wrong.
    """
    count, at, right = read_whole(text, after_spaces(text, at))
    # no line has more values than the text has bytes: ``place + count`` would overflow
    if not right or count < 0 or count > text.size or (width >= 0 and count != width):
        return at, -1
    if not ends_word(text[at]):
        return at, -1
    for number in range(place, place + count):
        at = after_spaces(text, at)
        if text[at] == NEWLINE:
            return at, -1
        at, right = put_number(text, at, is_float, out, number, hard)
        if not right or not ends_word(text[at]):
            return at, -1
    return at, count


@kernel
def multislot_lines(
    text: Array, floats: Array, widths: Array, counts: Array, out: Array, hard: Array, skip: bool
) -> Result:
    """MultiSlot: for each slot a count, and that many values; see the module's docstring.

    Args:
        floats: uint8 [slots]: whose values are floats.
        widths: int64 [slots]: the number of values that each sample must have; -1: any number.
        counts: int64 [lines, slots], written.
        out: int64 [words], written: the values of all slots in the order of the text; floats by
            their bits.
    """
    at = row = line = wrong = place = 0
    first, begin, end, field = -1, 0, 0, -1
    while at < text.size:
        after, written, slot, count = at, place, 0, 0
        while slot < floats.size:
            after, count = multislot_slot(
                text, after, floats[slot], widths[slot], out, written, hard
            )
            if count < 0:
                break
            counts[row, slot] = count
            written += count
            slot += 1
        after = after_spaces(text, after)
        if count >= 0 and text[after] == NEWLINE:
            row, at, place = row + 1, after + 1, written
        else:
            stop = line_end(text, at)
            if not wrong:
                first, begin, end, field = line, at, stop, slot
            wrong += 1
            at = stop + 1
            if not skip:
                break
        line += 1
    return row, wrong, first, begin, end, field


@kernel
def pick(values: Array, begins: Array, counts: Array, out: Array) -> None:
    """The values of one slot, from those of all slots sample by sample.

    Args:
        begins, counts: int64 [samples]: the begin and the number of each sample's values.
        out: written.
    """
    place = 0
    for row in range(counts.size):
        begin, count = begins[row], counts[row]
        out[place : place + count] = values[begin : begin + count]
        place += count
