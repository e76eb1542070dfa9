"""The picture of the prefix rule: the layout and the patterns of cells that the page starts from.

The page applies the rule itself (assets/prefix.js), so that a reader can click. The rule's one definition is
`kvcore.groups.CacheLayout`; tests/reports/test_page_prefix.py draws cases, answers them with it, and holds the page
against those answers: lengths, needed cells and the text of the explanation.
"""

from __future__ import annotations

from typing import Any

from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.reports.page.document import Widget

CHUNKS = 12
CHUNK_TOKENS = 16
WINDOW_TOKENS = 40
NOTE = (
    "A row is what one GPU rank keeps for one kind of layers, a column a chunk of the prompt. Click cells to put them "
    "into the cache or out of it, and a length to see what serving it needs: green frames are needed and there, red "
    "ones are needed and missing. A hit is the longest length that every row can serve."
)


def picture() -> Widget:
    """Three kinds of layers on two ranks, with patterns worth seeing."""
    layout = CacheLayout(
        (
            ObjectGroup(GroupKind.FULL, CHUNK_TOKENS, 1),
            ObjectGroup(GroupKind.WINDOW, CHUNK_TOKENS, 1, WINDOW_TOKENS),
            ObjectGroup(GroupKind.RECURRENT, CHUNK_TOKENS, 1),
        ),
        ranks=2,
        chunk_tokens=CHUNK_TOKENS,
    )
    full, window, state = "111111111111", "000111111111", "000100010001"
    patterns = [
        ("everything is there", [full] * 6),
        ("windows forgot their beginning, states are rare", [full, window, state] * 2),
        ("a hole in one rank's full attention", ["111101111111", full, full, full, full, full]),
        ("a hole in a window: longer prefixes are still served", [full, "111101111111", full] * 2),
        ("nothing is there", ["0" * CHUNKS] * 6),
    ]
    data = {
        "chunks": CHUNKS,
        "layout": as_json(layout),
        "patterns": [{"name": name, "rows": rows} for name, rows in patterns],
    }
    return Widget("prefix", "The prefix rule, to click", data, NOTE)


def as_json(layout: CacheLayout) -> dict[str, Any]:
    """What the rule needs to know of a layout."""
    groups = [{"kind": group.kind.value, "window_tokens": group.window_tokens} for group in layout.groups]
    return {"chunk_tokens": layout.chunk_tokens, "ranks": layout.ranks, "groups": groups}
