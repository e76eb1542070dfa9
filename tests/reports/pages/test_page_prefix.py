"""The picture of the prefix rule follows the rule: prefix.js against kvcore.groups, over drawn cases."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from kvcore.bitmap import bits
from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.reports.page.prefix import as_json, picture

Js = Callable[[str, str, Any], Any]
CASES = 1500

COMPUTE = """data.map((one) => {
  const lengths = Prefix.lengths(one.layout, one.rows, one.chunks, one.prompt, one.skip);
  const best = lengths[lengths.length - 1];
  return { lengths, needs: Prefix.rowsAt(one.layout, one.rows, one.prompt, best, one.skip).map((row) => row.needs),
    explain: Prefix.explain(one.layout, one.rows, one.chunks, one.prompt, one.length, one.skip) };
})"""


def drawn_layout(draw: random.Random) -> CacheLayout:
    tokens = draw.choice((1, 2, 4, 16))
    kinds = [draw.choice(list(GroupKind)) for _ in range(draw.randint(1, 3))]
    windows = [draw.randint(1, 50) if kind is GroupKind.WINDOW else None for kind in kinds]
    groups = tuple(ObjectGroup(kind, tokens, 1, window) for kind, window in zip(kinds, windows, strict=True))
    return CacheLayout(groups, draw.randint(1, 2), tokens)


def drawn(draw: random.Random) -> dict[str, Any]:
    """One case, and the layout's own answers."""
    layout = drawn_layout(draw)
    chunks = draw.randint(0, 40)
    prompt = chunks * layout.chunk_tokens + draw.choice((0, draw.randrange(layout.chunk_tokens)))
    holes = [sum(1 << chunk for chunk in range(chunks) if draw.random() < 0.3) for _ in layout.rows]
    rows = [((1 << chunks) - 1) & ~hole if draw.random() < 0.6 else (1 << chunks) - 1 for hole in holes]
    skip, length = draw.choice((0, draw.randint(0, chunks))), draw.randint(0, chunks)
    lengths = list(bits(layout.fold(rows, chunks, prompt, skip)))
    return {
        "case": {
            "layout": as_json(layout),
            "rows": [[bool(row >> chunk & 1) for chunk in range(chunks)] for row in rows],
            "chunks": chunks,
            "prompt": prompt,
            "skip": skip,
            "length": length,
        },
        "answer": {
            "lengths": lengths,
            "needs": [list(bits(row)) for row in layout.unfold(lengths[-1], prompt, skip)],
            "explain": layout.explain(rows, chunks, prompt, length, skip),
        },
    }


def is_whole_prompt(case: dict[str, Any]) -> bool:
    """The length asked about is all of the prompt, so its last token must be computed again."""
    return bool(
        0 < case["length"] == case["chunks"] and case["prompt"] == case["length"] * case["layout"]["chunk_tokens"]
    )


def test_the_page_follows_the_prefix_rule(javascript: Js) -> None:
    draw = random.Random(11)
    vectors = [drawn(draw) for _ in range(CASES)]
    found = javascript("prefix.js", COMPUTE, [vector["case"] for vector in vectors])
    for vector, answer in zip(vectors, found, strict=True):
        assert answer == vector["answer"], vector["case"]
    whole = [vector["case"] for vector in vectors if is_whole_prompt(vector["case"])]
    assert {one["layout"]["groups"][0]["kind"] for one in whole if len(one["layout"]["groups"]) == 1} == {
        kind.value for kind in GroupKind
    }
    texts = [vector["answer"]["explain"] for vector in vectors]
    assert any("already contains the last token" in text for text in texts)
    assert any("more" in text for text in texts)
    assert any(text.endswith(": servable") for text in texts)


def test_the_first_patterns_of_the_picture_are_what_their_names_say() -> None:
    data = picture().data
    best = {}
    groups = [ObjectGroup(GroupKind(each["kind"]), 16, 1, each["window_tokens"]) for each in data["layout"]["groups"]]
    layout = CacheLayout(tuple(groups), data["layout"]["ranks"], data["layout"]["chunk_tokens"])
    for pattern in data["patterns"]:
        rows = [sum(1 << at for at, cell in enumerate(row) if cell == "1") for row in pattern["rows"]]
        prompt = data["chunks"] * layout.chunk_tokens + 1
        best[pattern["name"]] = layout.best(layout.fold(rows, data["chunks"], prompt))
    assert list(best.values()) == [12, 12, 4, 12, 0]
