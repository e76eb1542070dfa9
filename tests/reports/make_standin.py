"""Prints tests/reports/standin.json: a small trace shaped like Mooncake's, and its hit rates. Not a test.

    python tests/reports/make_standin.py > tests/reports/standin.json

Conversations that grow, one system prompt before all of them, sizes that are no multiples of the block. The expected
rates come from the plainest cache there is, a list searched from one end to the other: not from the code under test.
"""

from __future__ import annotations

import itertools
import json
import random

BLOCK_TOKENS = 512
REQUESTS = 240
CONVERSATIONS = 24
CAPACITIES = (4, 16, 64, 160, 400)


def rows() -> list[tuple[int, list[int]]]:
    """(input tokens, block ids) in order of arrival."""
    chance = random.Random(20250218)
    fresh = itertools.count(1)
    chats: list[list[int]] = [[0] for _ in range(CONVERSATIONS)]
    trace = []
    for _ in range(REQUESTS):
        chat = chats[min(int(chance.expovariate(0.25)), CONVERSATIONS - 1)]
        chat.extend(next(fresh) for _ in range(chance.randint(1, 6)))
        partial = chance.randint(1, BLOCK_TOKENS)
        trace.append(((len(chat) - 1) * BLOCK_TOKENS + partial, list(chat)))
        if len(chat) > 40:
            chat[1:] = []
        elif partial < BLOCK_TOKENS:
            chat.pop()  # the partial block is another one when the conversation has grown
    return trace


def percent(trace: list[tuple[int, list[int]]], capacity: int) -> float:
    """The published rule, on a list: youngest block last."""
    resident: list[int] = []
    hit = asked = 0
    for at, (tokens, blocks) in enumerate(trace):
        leading = list(itertools.takewhile(resident.__contains__, blocks))
        if at >= len(trace) // 2:
            hit += min(tokens, BLOCK_TOKENS * len(leading))
            asked += tokens
        old = [block for block in resident if block not in blocks]
        resident = (old + blocks[::-1])[-capacity:]
    return 100 * hit / asked


def main() -> None:
    trace = rows()
    lines = ",\n  ".join(json.dumps({"input_length": tokens, "hash_ids": blocks}) for tokens, blocks in trace)
    expected = {str(capacity): round(percent(trace, capacity), 4) for capacity in CAPACITIES}
    print(f'{{"block_tokens": {BLOCK_TOKENS},\n "percent": {json.dumps(expected)},\n "requests": [\n  {lines}\n ]}}')


if __name__ == "__main__":
    main()
