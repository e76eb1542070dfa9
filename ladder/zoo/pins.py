"""`python -m kvcore.ladder.zoo.pins`: take down the sources of now as those that the mutants are written against.

For use after a look at the mutants of a function that has changed. Prints the functions whose source was another one.
"""

from __future__ import annotations

import sys

from kvcore.errors import ConfigError
from kvcore.ladder.zoo.catalogue import ZOO
from kvcore.ladder.zoo.patch import Patch, write_pins


def main() -> int:
    """Exit status 1 if a mutant does not fit any more, whatever the digests say."""
    changed = write_pins(edit.target for mutant in ZOO.values() for edit in mutant.edits)
    print(f"{len(changed)} changed: {', '.join(changed)}" if changed else "nothing has changed")
    misfits = [text for mutant in ZOO.values() if (text := _misfit(mutant.name))]
    for text in misfits:
        print(text, file=sys.stderr)
    return 1 if misfits else 0


def _misfit(name: str) -> str:
    patch = Patch()
    try:
        patch.rewrite(ZOO[name].edits)
    except ConfigError as error:
        return f"{name}: {error}"
    patch.undo()
    return ""


if __name__ == "__main__":
    sys.exit(main())
