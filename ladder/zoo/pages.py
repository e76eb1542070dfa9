"""Mutants of copies that the servers make from and to the workers' pages: when they begin and end, and where.

All are looked for with servers that copy (`transfer`).
"""

from __future__ import annotations

from functools import partial

from kvcore.ladder.zoo import mutant
from kvcore.ladder.zoo.mutant import Edit

_DESK = "kvcore.service.page_desk:PageDesk"
_CLIENT = "kvcore.service.page_client:PageClient"

bug = partial(mutant.bug, transfer="server")
safe = partial(mutant.safe, transfer="server")

MUTANTS = (
    bug(
        "server_answers_before_its_copy_has_ended",
        "A",
        "a cell with a thread is not named as running, and the worker's fence lets the blocks go (R01)",
        "blocks bytes output",
        Edit(
            "kvcore.service.page_desk:_Transfer.told",
            "for index in self.open)",
            "for index, cell in self.open.items() if not cell.begun)",
        ),
    ),
    bug(
        "cell_is_published_with_its_first_block",
        "B",
        "the end of one piece is taken for the end of its cells (R04, R29)",
        "bytes crash",
        Edit(f"{_DESK}._carried", "for move in moves if not move.cell.parts_left)", "for move in moves)"),
        Edit(f"{_DESK}._end", "del transfer.open[cell.index]", "transfer.open.pop(cell.index, None)"),
    ),
    bug(
        "cancel_ends_what_has_begun",
        "A",
        "a cancelled cell is over at once, although a thread is reading its blocks into staging (R01)",
        "bytes crash",
        Edit(f"{_DESK}.copies", "cancel >> cell.index & 1 and not cell.begun]", "cancel >> cell.index & 1]"),
    ),
    bug(
        "holds_of_copies_end_with_the_worker",
        "G",
        "a dead worker's cells end at once, also those in which a thread still moves bytes (R31)",
        "bytes crash l1",
        Edit(
            f"{_DESK}._drop_queued",
            "[cell for cell in transfer.open.values() if not cell.parts_left]",
            "list(transfer.open.values())",
        ),
    ),
    bug(
        "pages_are_closed_under_a_copy",
        "G",
        "who unregisters has its segment closed, with a thread of the server at it (R31)",
        "pages",
        Edit(f"{_DESK}.gone", "pages.close_if_unused()", "pages.memory.close()"),
    ),
    bug(
        "pages_of_the_first_worker",
        "I",
        "a server has the pages of one rank, and every rank copies from and to them (R42)",
        "bytes output blocks crash",
        Edit(
            f"{_DESK}._registered",
            "pages = self._pages.get(worker)",
            "pages = next(iter(self._pages.values()), None)",
        ),
    ),
    bug(
        "pages_of_the_rank_whatever_its_life",
        "G",
        "pages are known by rank: a worker that was started again gets those of its earlier life (R32)",
        "bytes output blocks crash server",
        Edit(
            f"{_DESK}.register",
            "known = self._pages.get(worker)\n",
            """\
known = next((each for name, each in self._pages.items() if name.split(".")[0] == worker.split(".")[0]), None)
    if known is not None:
        self._pages[worker] = known
        return
""",
        ),
    ),
    bug(
        "server_is_asked_before_the_forward_pass",
        "B",
        "the gate is not waited for: the server reads blocks that the device has not written yet (R04)",
        "bytes blocks",
        Edit(f"{_CLIENT}._have_copied", "gate.on_done(begin)", "begin()"),
    ),
    bug(
        "blocks_that_could_not_be_read_are_published",
        "E",
        "a store publishes all its cells, whether their blocks were there or not (R18, R19)",
        "bytes",
        Edit(f"{_DESK}._end", "if not (lost or cell.failed)]", "if not lost]"),
        Edit(f"{_DESK}._end", "if lost or cell.failed]", "if lost]"),
    ),
    bug(
        "blocks_that_could_not_be_written_count_as_loaded",
        "E",
        "a load is RELEASED when the lease was good, whatever became of its bytes (R16)",
        "bytes output",
        Edit(f"{_DESK}._end_read", "answer if fine else Answer.ABORTED", "answer"),
    ),
    bug(
        "pages_are_registered_with_the_first_server_life_only",
        "G",
        "a server that was started again does not know where the pages lie, and copies nothing any more (R31, R33)",
        "liveness",
        Edit(
            "kvcore.service.worker_client:WorkerClient._register",
            "self.pages.shared)",
            "self.pages.shared if connection.statistics().incarnations_seen < 2 else None)",
        ),
    ),
    safe(
        "a_dead_workers_store_is_published",
        "G",
        "what a thread had begun to read is published although its worker is gone (R31)",
        "the gate and the pages: nobody writes into a dead worker's, so what was read is what it had let go",
        Edit(f"{_DESK}._end", "lost = cancelled or transfer.pages.gone", "lost = cancelled"),
    ),
)
