"""Mutants of the second tier: its index, its records, its locks (groups E, J and K)."""

from __future__ import annotations

from kvcore.ladder.zoo.mutant import Edit, bug, safe

_ADAPTER = "kvcore.l2.indexed:IndexedAdapter"
_INDEX = "kvcore.l2.index:Index"
_ENVELOPE = "kvcore.l2.envelope"

MUTANTS = (
    bug(
        "payload_is_not_checked",
        "K",
        "a record is believed when its header is right; flipped bits in it are loaded (R16, R29)",
        "bytes",
        Edit(
            f"{_ENVELOPE}:_payload_defect", "return None if found == header.checksum else Defect.FLIPPED", "return None"
        ),
    ),
    safe(
        "key_in_the_record_is_not_compared",
        "J",
        "a record that lies under another key's name is believed (R47, R49)",
        "the checksum, which goes over the key as well as the payload",
        Edit(
            f"{_ENVELOPE}:check_record",
            "        _key_defect(header, head, encoded, bytes_read)\n        or _length_defect",
            "        _length_defect",
        ),
    ),
    bug(
        "neither_key_nor_payload_is_checked",
        "J",
        "any record of the right size is believed, also one that lies under another key's name (R47)",
        "bytes",
        Edit(
            f"{_ENVELOPE}:check_record",
            "        _key_defect(header, head, encoded, bytes_read)\n        or _length_defect",
            "        _length_defect",
        ),
        Edit(
            f"{_ENVELOPE}:_payload_defect", "return None if found == header.checksum else Defect.FLIPPED", "return None"
        ),
    ),
    bug(
        "failed_puts_keep_their_room",
        "K",
        "a write that failed stays reserved; after a while an empty store refuses everything (R52)",
        "crash memory",
        Edit(
            f"{_INDEX}.not_written",
            "    self._end_reservation(entry)\n",
            "",
        ),
    ),
    bug(
        "locked_records_are_evicted",
        "F",
        "a record is a victim although a lookup has locked it (R27)",
        "crash plan",
        Edit(f"{_INDEX}.lock", "    self._recency.remove(entry)\n", ""),
    ),
    safe(
        "missing_record_is_an_error",
        "K",
        "a record that went away between lookup and load raises instead of being a miss (R53, R54)",
        "the executor's work: any error of the store on a read is a miss and drops the record",
        Edit(
            "kvcore.l2.file:FileBackend.read",
            "        except FileNotFoundError:\n            return Defect.MISSING\n",
            "        except FileNotFoundError:\n            raise\n",
        ),
    ),
    safe(
        "errors_of_the_disk_are_not_caught",
        "K",
        "an operating system error on the store path leaves the piece of work (R53)",
        "the adapter: work that broke off has an unknown outcome, is answered FAILED and cleaned up",
        Edit("kvcore.l2.work:_write", "except Exception as failure:", "except StoreError as failure:"),
    ),
)
