"""The reports by kind: each module computes one and gives it as a `Report` (reports/page)."""
