"""What a run looked like around its violation, for the terminal and as Mermaid."""

from __future__ import annotations

from kvcore.ladder.repro.observe import Observed
from kvcore.sim.charts import mermaid, terminal
from kvcore.sim.charts.steps import cut, draw


def terminal_chart(observed: Observed, width: int) -> str:
    """Lanes per component, cut to what matters; at most `width` columns."""
    return terminal.render(cut(draw(observed.steps)), width)


def mermaid_chart(observed: Observed) -> str:
    """The same as a sequence diagram."""
    outcome = observed.outcome
    title = (
        f"{outcome.findings[0].oracle} at {outcome.findings[0].time_ns / 1000:.1f} us"
        if outcome.findings
        else "no finding"
    )
    return mermaid.render(cut(draw(observed.steps)), title)
