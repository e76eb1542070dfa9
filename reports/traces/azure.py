"""Azure's LLM inference traces: arrival, prompt and output lengths; nothing about prefixes.

Source: github.com/Azure/AzurePublicDataset, AzureLLMInferenceTrace_*.csv (Patel et al., ISCA 2024; CC-BY). Lines are
`2023-11-16 18:15:46.6805900,374,44` under a header. Every block gets an id of its own, so nothing ever hits: what such
a trace can tell is load and lengths, and the notes say so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

from kvcore.errors import ConfigError
from kvcore.reports.traces.trace import Request, Trace, check_tokens

BLOCK_TOKENS = 512
HEADER = b"TIMESTAMP,ContextTokens,GeneratedTokens"
NOTE = "the file tells nothing about shared prefixes: no request hits, whatever the cache"
LINE = re.compile(
    rb"(\d{4})-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01]) ([01]\d|2[0-3]):([0-5]\d):([0-5]\d(?:\.\d+)?)"
    rb",(-?\d{1,18}),(-?\d{1,18})\s*"
)
DAY_S = 86_400


def read(lines: Iterator[bytes], path: Path, limit: int | None) -> Trace:
    """The trace as it stands in the file, its first arrival at 0."""
    if next(lines, b"").strip().removeprefix(b"\xef\xbb\xbf") != HEADER:
        raise ConfigError(f"{path} does not begin with {HEADER.decode()}: it is no Azure trace")
    fresh = count()
    requests: list[Request] = []
    begin = None
    for number, line in islice(enumerate(lines, 2), limit):
        found = LINE.fullmatch(line)
        if found is None:
            raise ConfigError(f"{path}, line {number} is no request: {line[:60]!r}")
        tokens, output = int(found[7]), int(found[8])
        check_tokens(tokens, output, f"{path}, line {number}")
        time_s = _seconds(found)
        begin = time_s if begin is None else begin
        blocks = tuple(islice(fresh, -(-tokens // BLOCK_TOKENS)))
        requests.append(Request(time_s - begin, tokens, output, blocks))
    return Trace(path.name, BLOCK_TOKENS, tuple(requests), (NOTE,))


def _seconds(found: re.Match[bytes]) -> float:
    """Seconds on some calendar that is right for differences within a month, and for the month's end."""
    year, month, day = int(found[1]), int(found[2]), int(found[3])
    # Days of the proleptic Gregorian calendar, with March as the first month (so that the leap day is the last one).
    year -= month < 3
    days = 365 * year + year // 4 - year // 100 + year // 400 + (153 * ((month + 9) % 12) + 2) // 5 + day
    return days * DAY_S + int(found[4]) * 3600 + int(found[5]) * 60 + float(found[6])
