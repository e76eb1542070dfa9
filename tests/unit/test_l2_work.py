"""How batches of an indexed store are cut into pieces of work, and whose fault the error of one is."""

from __future__ import annotations

import pytest

from kvcore.errors import StoreError
from kvcore.keys import ObjectKey
from kvcore.l2 import work
from kvcore.l2.adapter import StoreAnswer

MIB = 1 << 20


@pytest.mark.parametrize(
    ("count", "size", "pieces"),
    [
        (4, 2 * MIB, [2, 2]),  # small batches: enough pieces for two threads
        (32, 2 * MIB, [8] * 4),  # large ones: no more pieces than threads want
        (64, 8 * MIB, [2] * 32),  # very large ones: no piece holds a thread for long
        (3, 20 * MIB, [1, 1, 1]),
        (512, MIB // 16, [128] * 4),
        (200, 4096, [128, 72]),
        (0, 0, []),
    ],
)
def test_a_batch_is_cut_into_few_pieces_and_none_is_long(count, size, pieces):
    cut = list(work.slices(range(count), [size] * count))
    assert [len(orders) for orders, _ in cut] == pieces
    assert [total for _, total in cut] == [size * length for length in pieces]
    assert [order for orders, _ in cut for order in orders] == list(range(count))


class Breaking:
    """Moves many at once, and breaks off with an exception where a payload of 0xff comes."""

    def __init__(self):
        self.parts = []

    def write_many(self, orders):
        self.parts.append(len(orders))
        if any(payload[0] == 0xFF for _, payload in orders):
            raise StoreError("broken")
        return [None] * len(orders)


def test_an_exception_while_a_part_of_a_piece_is_written_is_not_the_fault_of_the_others():
    payloads = [memoryview(bytes([0xFF if number == 3 else 1]) + bytes(2 * MIB - 1)) for number in range(6)]
    orders = [(ObjectKey(bytes([number]), "model", 0), payload) for number, payload in enumerate(payloads)]
    backend = Breaking()
    answers = [written.answer for written in work.write_all(backend, orders, {})]
    assert backend.parts == [2, 2, 2]
    assert answers == [StoreAnswer.STORED] * 2 + [StoreAnswer.RETRY] * 2 + [StoreAnswer.STORED] * 2
