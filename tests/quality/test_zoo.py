"""The zoo: deliberate bugs in the production code, each of which the simulation sees, and removals that are safe.

`pytest -m zoo` replays the recorded case of every mutant, with and without it, and searches afresh for three of them.
The densities over many seeds are `make zoo`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from statistics import NormalDist

import pytest

from kvcore.connectors.tracker import RequestTracker
from kvcore.errors import CallerError, ConfigError
from kvcore.ladder.swarm.case import Case
from kvcore.ladder.swarm.episode import run_case
from kvcore.ladder.zoo import patch as patching
from kvcore.ladder.zoo.catalogue import ZOO, find_mutant
from kvcore.ladder.zoo.command import CASES
from kvcore.ladder.zoo.interval import interval
from kvcore.ladder.zoo.measure import Effort, Measured, measure, unplanted
from kvcore.ladder.zoo.mutant import Edit, Mutant, bug, safe
from kvcore.ladder.zoo.patch import Patch, digest_of, find, pins, source_of
from kvcore.ladder.zoo.planted import planted
from kvcore.ladder.zoo.result import ZooResult

BUGS = [name for name, mutant in ZOO.items() if mutant.kind != "safe"]
GROUPS = "ABCDEFGHIJKL"
SEARCHED = ("publish_before_the_copy_has_ended", "minimum_over_servers", "second_writer_is_never_freed")
PROMISE = "kvcore.connectors.tracker:RequestTracker.promise"

# ---- the collection


def test_every_group_of_the_public_reports_has_mutants() -> None:
    assert {mutant.group for mutant in ZOO.values()} == set(GROUPS)


def test_there_are_enough_of_each_kind() -> None:
    kinds = Counter(mutant.kind for mutant in ZOO.values())
    assert kinds["bug"] + kinds["hard"] >= 40
    assert kinds["hard"] >= 5
    assert kinds["safe"] >= 4


def test_every_reason_names_a_public_report() -> None:
    assert [name for name, mutant in ZOO.items() if "(R" not in mutant.reason] == []


@pytest.mark.parametrize("name", ZOO)
def test_a_mutant_fits_the_code_of_now_and_is_taken_out_again(name: str) -> None:
    """Planting changes each function it names, and nothing is left of it afterwards."""
    functions = {edit.target: find(edit.target)[1] for edit in ZOO[name].edits}
    before = {target: function.__code__ for target, function in functions.items()}
    with planted(name):
        for target, function in functions.items():
            assert function.__code__ != before[target], f"{target} is as it was"
    assert {target: function.__code__ for target, function in functions.items()} == before


# ---- planting


def test_a_planted_function_runs_the_new_text_wherever_it_was_imported_to() -> None:
    """`span` is imported by name into `kvcore.groups`."""
    from kvcore import groups

    edit = Edit("kvcore.bitmap:span", "if stop > start else 0", "if stop >= start else 0")
    patch = Patch()
    patching.pins()["kvcore.bitmap:span"] = digest_of("kvcore.bitmap:span")
    try:
        patch.rewrite([Edit(edit.target, "    return ((1 << (stop - start)) - 1) << start", "    return 7")])
        assert groups.span(0, 0) == 0
        assert groups.span(0, 1) == 7
    finally:
        patch.undo()
        del patching.pins()["kvcore.bitmap:span"]
    assert groups.span(0, 1) == 1


def test_a_function_that_has_changed_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pins(), PROMISE, "another digest")
    code = RequestTracker.promise.__code__
    with (
        pytest.raises(ConfigError, match=r"RequestTracker\.promise has changed"),
        planted("hit_shorter_than_the_local_prefix_is_negative"),
    ):
        pass
    assert RequestTracker.promise.__code__ is code


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (Edit(PROMISE, "no such text", "x"), "0 times"),
        (Edit(PROMISE, "local_tokens", "x"), r"\d+ times"),
        (Edit(PROMISE, "return self.promised_tokens", "return self."), "no Python"),
        (Edit(PROMISE, "def promise(self, local_tokens: int)", "def promise(self)"), "other arguments"),
        (Edit("kvcore.connectors.tracker:RequestTracker.gone", "a", "b"), "does not exist"),
        (Edit("kvcore.connectors.tracker:RequestTracker", "a", "b"), "no plain function"),
        (Edit("kvcore.sim.loop:SimLoop.run_forever", "a", "b"), "not production code"),
        (Edit("kvcore.ladder.climb:climb_all", "a", "b"), "not production code"),
    ],
)
def test_an_edit_that_does_not_fit_is_refused_and_nothing_is_planted(edit: Edit, text: str) -> None:
    code = RequestTracker.promise.__code__
    patch = Patch()
    with pytest.raises(ConfigError, match=text):
        patch.rewrite([Edit(PROMISE, "max(0, usable - local_tokens)", "0"), edit])
    assert RequestTracker.promise.__code__ is code


def test_the_digest_is_blind_to_comments_docstrings_and_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    text = source_of(PROMISE)
    before = digest_of(PROMISE)
    other = text.replace('"""Tokens beyond', '"""# Other words, beyond').replace(
        "    usable =", "    # why\n    usable  = "
    )
    assert other != text
    monkeypatch.setattr(patching, "source_of", lambda target: other)
    assert digest_of(PROMISE) == before
    monkeypatch.setattr(patching, "source_of", lambda target: text.replace("usable - local", "usable + local"))
    assert digest_of(PROMISE) != before


def test_mutants_are_planted_one_at_a_time() -> None:
    with planted(SEARCHED[0]):
        with planted(SEARCHED[0]):
            pass
        with pytest.raises(CallerError, match="is planted"), planted(SEARCHED[1]):
            pass
        assert find(ZOO[SEARCHED[0]].edits[0].target)[1].__code__.co_filename.startswith("<zoo")


def test_an_unknown_mutant_is_refused_with_those_that_are_like_it() -> None:
    with pytest.raises(ConfigError, match="second_writer_is_never_freed"):
        find_mutant("second_writer")


# ---- judging


def measured(mutant: Mutant, oracle: str = "", catches: int = 0, seeds: int = 1000, needed: int = 1) -> Measured:
    result = Measured(mutant, seeds, seeds_needed=needed)
    if catches:
        result.oracles[oracle] = catches
        result.oracle, result.first_seed = oracle, needed - 1
    return result


EDIT = Edit("kvcore.x:f", "a", "b")
A_BUG = bug("a_bug", "A", "(R01)", "bytes blocks", EDIT)
A_SAFE_ONE = safe("a_safe_one", "A", "(R01)", "something else", EDIT)


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (measured(A_BUG, "blocks", 30, 60), ""),
        (measured(A_BUG, "crash", 30, 60), "caught by .crash., expected was bytes or blocks"),
        (measured(A_BUG), "was not caught"),
        (measured(A_BUG, "bytes", 1, needed=201), "was not caught in 200 seeds"),
        (measured(A_SAFE_ONE), ""),
        (measured(A_SAFE_ONE, "bytes", 1), "is not safe"),
    ],
)
def test_a_measurement_is_judged(result: Measured, problem: str) -> None:
    if problem:
        assert result.problem
        with pytest.raises(AssertionError, match=problem):
            raise AssertionError(result.problem)
    else:
        assert result.problem == ""
    assert ZooResult([result], whole=False).verdict == ("fail" if problem else "pass")


def test_a_slow_median_fails_the_whole_zoo_but_not_a_part_of_it() -> None:
    slow = [measured(A_BUG, "bytes", 5, needed=50)]
    assert ZooResult(slow, whole=False).verdict == "pass"
    assert ZooResult(slow, whole=True).verdict == "fail"


@pytest.mark.parametrize(("catches", "seeds"), [(0, 1000), (1, 1000), (30, 100), (30, 1000), (7, 7), (0, 0)])
def test_the_interval_holds_the_density(catches: int, seeds: int) -> None:
    """Against what is known: the rule of three, the normal approximation, and the ends."""
    low, high = interval(catches, seeds)
    share = catches / seeds if seeds else 0.5
    assert low <= share <= high
    if catches == 0 and seeds:
        assert low == 0
        assert high == pytest.approx(1 - 0.025 ** (1 / seeds), rel=1e-6)
    if catches == 30:
        spread = NormalDist().inv_cdf(0.975) * math.sqrt(share * (1 - share) / seeds)
        assert (low, high) == pytest.approx((share - spread, share + spread), abs=0.3 * spread)


# ---- the bugs


@pytest.mark.zoo
@pytest.mark.parametrize("name", BUGS)
def test_the_recorded_case_fails_with_the_mutant_and_passes_without(name: str) -> None:
    """What is caught is the bug, not the configuration, and by an oracle that was expected."""
    path = Path(CASES) / f"{name}.json"
    if not path.exists():
        assert ZOO[name].note, f"{name} has neither a recorded catch nor a reason why not"
        pytest.skip(ZOO[name].note)
    case = Case.from_json(path.read_text())
    assert case.mutant == name
    with planted(name):
        outcome = run_case(case)
    assert outcome.oracle in ZOO[name].oracles, outcome.findings
    assert run_case(unplanted(case)).findings == []


@pytest.mark.zoo
@pytest.mark.parametrize("name", SEARCHED)
def test_a_search_afresh_finds_it(name: str) -> None:
    result = measure(name, Effort(seeds_max=ZOO[name].budget_seeds, catches_max=1, shrink_runs=0))
    assert result.problem == ""
    assert result.oracle in ZOO[name].oracles
    assert json.dumps(result.to_json())
