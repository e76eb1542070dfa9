"""`kvcore conformance`: kvcore keeps its own contract, and a cache that does not is shown where."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kvcore import cli
from kvcore.errors import ConfigError
from kvcore.groups import GroupKind, _Rule
from kvcore.l1 import L1Cache
from kvcore.ladder.conformance import command, search
from kvcore.ladder.conformance.moves import ROOM, Move
from kvcore.ladder.conformance.own import Own, OwnCache
from kvcore.ladder.conformance.peer import WORDS, Peer
from kvcore.ladder.conformance.play import play
from kvcore.ladder.conformance.scenarios import SCENARIOS
from kvcore.leases import LeaseTable

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "peers.md").read_text(encoding="utf-8")
FEW = 20  # planted bugs are met by the scenarios; the search then has little to add


class Deviant(Own):
    """kvcore with one thing done otherwise: `kind` is the class of its caches."""

    def __init__(self, kind, means=()):
        self.kind = kind
        self.means = dict(means)

    def cache(self, room):
        return self.kind(room)


def found(peer):
    return {(each.call, each.expected, each.said): each for each in search.compare(peer, FEW).differences}


def test_kvcore_keeps_its_own_contract():
    result = search.compare(Own(), 100)
    assert result.same, "\n".join(result.lines())
    assert result.runs >= 100
    assert list(result.lines())[-1] == "the same contract"


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_means_something_to_the_end(name):
    """A move that the model leaves out would make a scenario say less than its name."""
    steps = list(play(SCENARIOS[name], Own().cache(ROOM), {}))
    assert [step.move for step in steps] == SCENARIOS[name]
    assert all(step.agrees for step in steps)


def test_the_search_reaches_every_word_of_the_contract():
    """A run that never hears `locked` says nothing about locks."""
    one = search._Search(Own(), 400)
    one.differences()
    heard = {(call, meaning) for (call, _), meanings in one._meanings.items() for meaning in meanings}
    assert {(call, word) for call, words in WORDS.items() for word in words} <= heard


# --- planted deviations


def test_a_second_writer_that_replaces_the_first_is_shown():
    """R29: the loser of two writers overwrites what readers are reading."""

    class Replacing(OwnCache):
        def finish_write(self, tag, key):
            staged = {each.chunk_hash[0]: slot for each, slot in self.l1._staging.of(tag).items()}
            resident = {each.chunk_hash[0]: self.l1.slot_of(each) for each in self.l1.resident_keys()}
            if key in staged and key in resident:
                self.l1.view(resident[key])[:] = self.l1.view(staged[key])
            return super().finish_write(tag, key)

    difference = found(Deviant(Replacing))["read", "what was written", "something else"]
    assert [str(step.move) for step in difference.run][-3:] == [
        "reserve_read(A, k0)",
        "finish_write(w2, k0)",
        "read(A, k0)",
    ]
    assert all(step.agrees for step in difference.run[:-1])


def test_an_expired_reservation_that_is_published_is_shown(monkeypatch):
    """R21: expiry looks like completion."""
    original = L1Cache.expire

    def expire(self, now_ns):
        due = [slot for slot in self._staging.slots() if slot.lease is not None and slot.lease.deadline_ns <= now_ns]
        for slot in due:
            self.finish_write(slot.lease.holder, [slot.key])
        return original(self, now_ns) + len(due)

    monkeypatch.setattr(L1Cache, "expire", expire)
    difference = found(Own())["finish_write", "expired", "unknown"]
    assert [str(step.move) for step in difference.run] == [
        "reserve_write(w1, k0)",
        "pass_time(2)",
        "finish_write(w1, k0)",
    ]


def test_a_stale_release_that_takes_another_readers_lease_is_shown_with_what_it_does(monkeypatch):
    """R65, R26 b."""
    original = LeaseTable.release

    def release(self, owner, keys, find):
        other = next((each for each in self._held if each != owner), owner) if owner not in self._held else owner
        return original(self, other, keys, find)

    monkeypatch.setattr(LeaseTable, "release", release)
    differences = found(Own())
    assert not differences["finish_read", "unknown", "released"].consequence
    deleted = differences["delete", "locked", "deleted"]
    assert deleted.consequence
    assert [str(step.move) for step in deleted.run if not step.agrees] == ["finish_read(B, k0)", "delete(k0)"]


def test_a_window_in_whole_chunks_and_a_whole_recurrent_prompt_are_shown(monkeypatch):
    """R14, R07: each by a lookup of one row."""
    original = _Rule.serves_full_hit

    def serves_full_hit(self, present, chunks):
        if self.kind is GroupKind.RECURRENT:
            return bool(present >> (chunks - 1) & 1)
        return original(self, present, chunks)

    monkeypatch.setattr(_Rule, "serves_full_hit", serves_full_hit)
    (difference,) = search.compare(Own(), FEW).prefix or ()
    assert difference.what == "serves what the contract does not, recurrent, the whole prompt"
    assert difference.lookup == "prompt of 2 tokens, 1 chunks of 2: recurrent has chunks [0]"
    assert (difference.expected, difference.said) == ("serves [0]", "serves [0, 1]")


def test_a_word_for_two_things_is_a_difference_of_its_own():
    class Terse(OwnCache):
        def finish_write(self, tag, key):
            return super().finish_write(tag, key).replace("published", "ok").replace("discarded", "ok")

    result = search.compare(Deviant(Terse, {"finish_write": {"ok": ["published", "discarded"]}}), FEW)
    assert result.differences == ()
    (coarse,) = result.coarse
    assert (coarse.call, coarse.word) == ("finish_write", "ok")
    assert dict(coarse.runs)["published"] == ("reserve_write(w1, k0)", "finish_write(w1, k0)")
    assert not result.same


def test_what_a_peer_raises_is_an_answer():
    class Raising(OwnCache):
        def delete(self, key):
            raise LookupError(key)

    differences = found(Deviant(Raising))
    assert ("delete", "unknown", "raises LookupError") in differences


def test_what_needs_time_is_played_again_on_the_peers_own_clock():
    """`real_cache` of a peer whose lock runs out in the model of its time only."""

    class Late(OwnCache):
        def finish_write(self, tag, key):
            return super().finish_write(tag, key).replace("expired", "unknown")

    peer = Deviant(Late)
    peer.real_cache = OwnCache
    difference = found(peer)["finish_write", "expired", "unknown"]
    assert difference.on_its_clock is False
    assert any("NOT seen" in line for line in difference.lines())


# --- the command


PEER = """
from kvcore.ladder.conformance.own import Own, OwnCache

class Forgiving(OwnCache):
    def delete(self, key):
        said = super().delete(key)
        return "deleted" if said == "locked" else said

class Peer(Own):
    name = "a forgiving cache"
    def cache(self, room):
        return Forgiving(room)

def no_peer():
    return 1

def broken():
    raise ValueError("no store at this address")
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "forgiving_cache.py").write_text(textwrap.dedent(PEER))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def run(capsys, *words):
    code = cli.main(["conformance", *words])
    return code, *capsys.readouterr()


def test_kvcore_against_itself_ends_with_0(capsys):
    code, out, _ = run(capsys, "--peer", "kvcore", "--examples", "20")
    assert (code, out.splitlines()[-1]) == (0, "the same contract")


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize("where", [(), ("--python", sys.executable)], ids=["here", "in another interpreter"])
def test_a_peer_that_differs_ends_with_1_and_is_explained(capsys, where):
    code, out, _ = run(capsys, "--peer", "forgiving_cache:Peer", "--examples", "20", "--json", *where)
    result = json.loads(out)
    assert code == 1
    assert result["peer"] == "a forgiving cache"
    assert ("delete", "locked", "deleted") in {(d["call"], d["expected"], d["said"]) for d in result["differences"]}
    (shown,) = [d for d in result["differences"] if d["call"] == "delete"]
    assert [step["agrees"] for step in shown["run"]] == [True] * (len(shown["run"]) - 1) + [False]


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("nowhere.at_all:Peer", "No module named 'nowhere'"),
        ("forgiving_cache:Missing", "has no attribute 'Missing'"),
        ("forgiving_cache", "neither 'lmcache' nor 'package.module:factory'"),
        ("forgiving_cache:no_peer", "it has no 'name'"),
        ("forgiving_cache:broken", "no store at this address"),
    ],
)
def test_a_peer_that_cannot_be_loaded_ends_with_2(capsys, spec, says):
    code, out, errors = run(capsys, "--peer", spec)
    assert (code, out) == (2, "")
    assert says in errors


def test_the_cache_on_the_page_differs_as_the_page_says(capsys, tmp_path, monkeypatch):
    code, printed = re.findall(r"```(?:python|text)\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "dict_cache.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    status, out, _ = run(capsys, "--peer", "dict_cache:DictPeer", "--examples", "20")
    assert status == 1
    shown = [line.strip() for line in out.splitlines()]
    head, *steps = [line.strip() for line in printed.splitlines()]
    at = next(number for number, line in enumerate(shown) if line.endswith(head))
    assert shown[at + 1 : at + 1 + len(steps)] == steps
    assert "The prefix rule was not compared: the peer has none." in out


@pytest.mark.parametrize("elsewhere", [[], ["--python", sys.executable]], ids=["here", "elsewhere"])
def test_a_peer_lies_in_the_current_directory(tmp_path, elsewhere):
    """As the installed command finds it, whose own path begins with the folder of the command."""
    (tmp_path / "no_cache.py").write_text("class Peer:\n    name = 'found'\n")
    kvcore = [str(Path(sys.executable).parent / "kvcore"), "conformance", "--peer", "no_cache:Peer", *elsewhere]
    done = subprocess.run(kvcore, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no_cache:Peer gave no peer" in done.stderr


def test_an_interpreter_that_is_none_and_one_without_the_peer_end_with_2(capsys, tmp_path):
    code, _, errors = run(capsys, "--peer", "kvcore.nothing:Peer", "--python", str(tmp_path / "python"))
    assert (code, "cannot start" in errors) == (2, True)
    code, _, errors = run(capsys, "--peer", "nowhere:Peer", "--python", sys.executable)
    assert (code, "No module named 'nowhere'" in errors) == (2, True)


def test_lmcache_that_is_not_here_is_named_with_a_way_out(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lmcache", None)
    code, out, errors = run(capsys, "--peer", "lmcache")
    assert (code, out) == (2, "")
    assert "--python" in errors


def test_without_hypothesis_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(ConfigError, match=r"kvcore\[conformance\]"):
        search.check_installed()


def test_examples_must_be_a_number(capsys):
    code, _, errors = run(capsys, "--peer", "kvcore", "--examples", "many")
    assert (code, "--examples" in errors) == (2, True)


def test_the_adapter_and_the_child_import_nothing_of_kvcore():
    """They run where it is not installed."""
    folder = command.__file__.rpartition("/")[0]
    for name in ("child.py", "lmcache_peer.py"):
        with open(f"{folder}/{name}") as file:
            assert not [line for line in file if line.lstrip().startswith(("from kvcore", "import kvcore"))]
    alone = subprocess.run(
        [sys.executable, "-I", "-S", f"{folder}/child.py", "no peer"], capture_output=True, text=True, check=False
    )
    assert "neither 'lmcache' nor" in alone.stderr


def test_moves_read_like_calls():
    assert str(Move("reserve_write", "w1", keys=(0, 1), temporary=True)) == "reserve_write(w1, k0 k1, temporary)"
    assert isinstance(Own(), Peer)
