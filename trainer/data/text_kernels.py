"""Numbers from text: whole buffers of lines at once, compiled by numba, without the GIL.

Each kernel of lines takes ``text``, uint8 [bytes], whose last byte ends a line, and ``skip``:
whether it continues after a wrong line, or stops there.  It returns the number of right lines, the
number of wrong lines, and of the first wrong one the number from 0 (-1: there is none), the offsets
of its begin and end, and the place of its first wrong field.  A kernel of cells takes a column of
fields, which pyarrow has found.

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
from pserver.table.xxh3 import LONGEST, hash_of
from trainer.data.batches import Array

TAB, NEWLINE, RETURN, SPACE, POINT = 9, 10, 13, 32, 46
PLUS, MINUS, ZERO = 43, 45, 48
NUMBERS, CATEGORIES = 13, 26
CATEGORY_BITS = 32
MISSING = 2**CATEGORY_BITS  # above all categories of a slot: an id of its own
CELL = 63  # bytes of a cell that the kernels read
FEW = 15  # digits: their number is exact in double
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
def line_ends(text: Array) -> int:
    """The number of line feeds."""
    found = 0
    for at in range(text.size):
        found += text[at] == NEWLINE
    return found


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
def rows_of(text: Array, delimiter: int, quote: int, wanted: int) -> tuple[int, int, int, int]:
    """The rows of CSV, as pyarrow divides them: a line feed, a carriage return or both end a row,
    except between quotes, and a line without a byte is no row.

    Args:
        text: any bytes; a row without an end is not counted.
        quote: -1: no byte is a quote.
        wanted: the number of a row, from 0.

    Returns:
        The number of rows, the offset after the last one, that of the first row that has a line
        feed between quotes, and that of the wanted row; -1: there is none.
    """
    ends = np.zeros(256, np.bool_)  # whether a byte ends a field
    ends[NEWLINE] = ends[RETURN] = ends[delimiter] = True
    at = rows = cut = 0
    broken = found = -1
    while at < text.size:
        if text[at] == NEWLINE or text[at] == RETURN:
            at += 1
            cut = at
            continue
        begin = at  # of the row
        while at < text.size:  # a field begins here
            if text[at] == quote:
                at += 1
                while at < text.size:
                    if text[at] == quote:
                        at += 1
                        if at == text.size or text[at] != quote:
                            break
                    elif text[at] == NEWLINE and broken < 0:
                        broken = begin
                    at += 1
            while at < text.size and not ends[text[at]]:
                at += 1
            if at == text.size or text[at] != delimiter:
                break
            at += 1
        if at == text.size:
            break
        if text[at] == RETURN and at + 1 < text.size and text[at + 1] == NEWLINE:
            at += 1
        at += 1
        if rows == wanted:
            found = begin
        rows += 1
        cut = at
    return rows, cut, broken, found


@kernel
def cell_digits(text: Array, begin: int, end: int) -> Any:
    """The number of a cell of few digits and nothing else; -1: it is another one."""
    if begin == end or end - begin > FEW:
        return -1
    value = np.int64(0)
    for place in range(begin, end):
        digit = np.int64(text[place]) - ZERO
        if digit < 0 or digit > 9:
            return -1
        value = value * 10 + digit
    return value


@kernel
def cell_word(text: Array, begin: int, end: int, word: Array) -> int:
    """Copies a cell without the spaces around it into ``word``, with the end of a line behind it.

    Returns:
        Its bytes, of which ``word`` may have no room for the last.
    """
    while begin < end and (text[begin] == SPACE or text[begin] == TAB):
        begin += 1
    while begin < end and (text[end - 1] == SPACE or text[end - 1] == TAB):
        end -= 1
    size = min(end - begin, CELL)
    for place in range(size):
        word[place] = text[begin + place]
    word[size] = NEWLINE
    return end - begin


@kernel
def whole_cells(
    text: Array, ends: Array, filled: bool, fill: int, out: Array, wrong: Array, mark: int
) -> None:
    """The whole numbers of a column of cells, as :func:`read_whole` reads them.

    Args:
        text: uint8 [bytes]: the cells side by side, without anything between them.
        ends: int32 [rows + 1]: where each begins, and the last one ends.
        filled, fill: whether a cell may be empty, and what it is then.
        out: int64 [rows], written.
        wrong: int32 [rows]: gets ``mark`` where it is 0 and the cell is wrong.
    """
    word = np.empty(CELL + 1, np.uint8)
    for row in range(out.size):
        few = cell_digits(text, ends[row], ends[row + 1])
        if few >= 0:
            out[row] = few
            continue
        size = cell_word(text, ends[row], ends[row + 1], word)
        if not size:
            out[row], right = fill, filled
        else:
            value, after, right = read_whole(word, 0)
            out[row], right = value, right and after == size
        if not right and not wrong[row]:
            wrong[row] = mark


@kernel
def float_cells(
    text: Array,
    ends: Array,
    filled: bool,
    fill: float,
    out: Array,
    wrong: Array,
    mark: int,
    hard: Array,
) -> int:
    """The finite floats of a column of cells, as :func:`read_float` reads them; see
    :func:`whole_cells`.

    Args:
        out: float32 or float64 [rows], written.
        hard: int64 [rows], written: the rows that Python reads; see [Note: exact numbers].

    Returns:
        How many these are.
    """
    word = np.empty(CELL + 1, np.uint8)
    many = 0
    for row in range(out.size):
        few = cell_digits(text, ends[row], ends[row + 1])
        if few >= 0:
            out[row] = few
            continue
        size = cell_word(text, ends[row], ends[row + 1], word)
        right = True
        if not size:
            out[row], right = fill, filled
        elif size > CELL:
            hard[many] = row
            many += 1
        else:
            value, after, state = read_float(word, 0)
            if state == HARD and after == size:
                hard[many] = row
                many += 1
            else:
                out[row] = value
                right = state == EXACT and after == size and np.isfinite(out[row])
        if not right and not wrong[row]:
            wrong[row] = mark
    return many


@kernel
def text_cells(
    text: Array, ends: Array, filled: bool, fill: int, out: Array, wrong: Array, mark: int
) -> int:
    """The ids of a column of cells that hold text; see :func:`whole_cells`.

    Returns:
        The number of texts that are too long for it; their places in ``out`` are not written.
    """
    long = 0
    for row in range(out.size):
        begin = np.int64(ends[row])
        size = np.int64(ends[row + 1]) - begin
        if not size:
            out[row] = fill
            if not filled and not wrong[row]:
                wrong[row] = mark
        elif size <= LONGEST:
            out[row] = hash_of(text, begin, size)
        else:
            long += 1
    return long


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
    text: Array,
    floats: Array,
    widths: Array,
    counts: Array,
    numbers: Array,
    out: Array,
    hard: Array,
    skip: bool,
) -> Result:
    """MultiSlot: for each slot a count, and that many values; see the module's docstring.

    Args:
        floats: uint8 [slots]: whose values are floats.
        widths: int64 [slots]: the number of values that each sample must have; -1: any number.
        counts: int64 [lines, slots], written.
        numbers: int64 [lines], written: of each right line, from 0.
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
            numbers[row] = line
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
