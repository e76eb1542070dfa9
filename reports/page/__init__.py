"""Reports as folders: what they consist of (document), and their forms (HTML, PNG, JSON, CSV, JSONL)."""

from __future__ import annotations

from kvcore.reports.page.document import Bars, Column, Lines, Mark, Matrix, Report, Series, Table, Value, Widget
from kvcore.reports.page.folder import Kept, check_folder, keep, read_report, write
from kvcore.reports.page.png import check_drawing
from kvcore.reports.page.provenance import provenance
from kvcore.reports.page.work import Work

__all__ = [
    "Bars",
    "Column",
    "Kept",
    "Lines",
    "Mark",
    "Matrix",
    "Report",
    "Series",
    "Table",
    "Value",
    "Widget",
    "Work",
    "check_drawing",
    "check_folder",
    "keep",
    "provenance",
    "read_report",
    "write",
]
