"""The link between a device and the memory of its host: how fast values are copied out and in."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from numbers import Real
from typing import Any

from remat.errors import InvalidInput, InvalidPlan, shown, unknown_name
from remat.units import MAX_BYTES, format_size, parse_size

NS = 10**9
LATENCY_S = 1e-5
AUTO = "auto"  # in place of a link: that of the GPU
# Rates that copies of pinned memory reach, in bytes per second: to the host, from the host. PCIe x16: about 78 % of
# 15.75, 31.5 and 63 GB/s, which encoding leaves of 8, 16 and 32 GT/s a lane. c2c (GH200): as measured by Schieffer et
# al., "Harnessing Integrated CPU-GPU System Memory for HPC" (arXiv:2407.07850), of 450 GB/s.
LINKS = {
    "pcie3": (12 * NS, 12 * NS),
    "pcie4": (25 * NS, 25 * NS),
    "pcie5": (50 * NS, 50 * NS),
    "c2c": (297 * NS, 375 * NS),
}
_RATE = re.compile(r"(.+)/\s*s", re.IGNORECASE)
_HELP = f"write e.g. 12GB/s, 25GB/s,50GB/s (to the host, from it) or {', '.join(LINKS)}"


@dataclass(frozen=True, slots=True)
class Link:
    """Copies to the host and back: one at a time each way, beside each other and beside the computations.

    A copy lasts the latency and its bytes over the rate of its direction, rounded up to a nanosecond.

    Attributes:
        to_host, from_host: bytes per second; text as ``12GB/s`` is read. 0 for no link.
        latency_s: of each copy.
        host_bytes: of host memory for copies; None for as much as is asked for.
        duplex: share of both rates that is left where both directions are busy. It is counted for every copy, so that
            no promise depends on what else is copied.

    Raises:
        InvalidInput: a value that is no such number.
    """

    to_host: int
    from_host: int
    latency_s: float = LATENCY_S
    host_bytes: int | None = None
    duplex: float = 1.0

    def __post_init__(self) -> None:
        for name in ("to_host", "from_host"):
            object.__setattr__(self, name, _rate(name, getattr(self, name)))
        if not _is_number(self.latency_s) or not 0 <= self.latency_s <= 1:
            raise InvalidInput(f"latency_s must be a number of seconds from 0 to 1, not {shown(self.latency_s)}")
        if not _is_number(self.duplex) or not 0 < self.duplex <= 1:
            raise InvalidInput(f"duplex must be above 0 and at most 1, not {shown(self.duplex)}")
        for name in ("latency_s", "duplex"):  # files cannot hold NumPy's numbers
            object.__setattr__(self, name, float(getattr(self, name)))
        if self.host_bytes is not None:
            object.__setattr__(self, "host_bytes", parse_size(self.host_bytes))

    def __str__(self) -> str:
        rates = [f"{rate / 1e9:g} GB/s" for rate in (self.to_host, self.from_host)]
        parts = [rates[0] if rates[0] == rates[1] else f"{rates[0]} to the host, {rates[1]} from it"]
        parts += [] if self.duplex == 1 else [f"{self.duplex:g} of it where both are busy"]
        parts += [] if self.latency_s == LATENCY_S else [f"{self.latency_s:g} s latency"]
        parts += [] if self.host_bytes is None else [f"{format_size(self.host_bytes)} on the host"]
        return ", ".join(parts)

    def is_no_worse_than(self, other: Link) -> bool:
        """Whether every plan over the other link is one over this, and ends no later."""
        has_room = self.host_bytes is None or (other.host_bytes is not None and self.host_bytes >= other.host_bytes)
        pairs = (self.to_host, other.to_host), (self.from_host, other.from_host)
        is_as_fast = all(own * self.duplex >= rate * other.duplex for own, rate in pairs)
        return has_room and is_as_fast and self.latency_s <= other.latency_s

    def out_ns(self, n_bytes: int) -> int:
        """How long a copy to the host lasts."""
        return self._copy_ns(n_bytes, self.to_host)

    def in_ns(self, n_bytes: int) -> int:
        """How long a copy from the host lasts."""
        return self._copy_ns(n_bytes, self.from_host)

    def _copy_ns(self, n_bytes: int, rate: int) -> int:
        return round(self.latency_s * NS) + -(-n_bytes * NS // max(1, int(rate * self.duplex)))

    def document(self) -> dict[str, Any]:
        """The link as plan files have it."""
        return asdict(self)

    @classmethod
    def from_document(cls, document: Any) -> Link:
        """The link in a plan file; raises `InvalidPlan` if it is none."""
        if not isinstance(document, Mapping) or not set(document) <= {f.name for f in fields(cls)}:
            raise InvalidPlan(f"'link' must be an object with {', '.join(f.name for f in fields(cls))} or null")
        missing = [name for name in ("to_host", "from_host") if name not in document]
        if missing:
            raise InvalidPlan(f"'link' lacks '{missing[0]}'")
        try:
            return cls(**document)
        except InvalidInput as error:
            raise InvalidPlan(f"'link': {error}") from None


def is_auto(link: object) -> bool:
    """Whether `AUTO` is given in place of a link."""
    return isinstance(link, str) and link == AUTO


def parse_link(link: Link | str | None) -> Link | None:
    """The link of that name or rate; None for none, and for one whose rate is 0.

    Raises:
        InvalidInput: no name and no rate with a unit.
    """
    if link is None or isinstance(link, Link):
        found = link
    elif not isinstance(link, str):
        raise InvalidInput(f"link must be a remat.Link or text, not {shown(link)}; {_HELP}")
    elif link.strip().lower() in LINKS:
        found = Link(*LINKS[link.strip().lower()])
    elif "/" not in link and any(c.isalpha() for c in link) and not link.strip()[:1].isdigit():
        raise unknown_name("link", link, LINKS)
    else:
        rates = link.split(",")
        if len(rates) > 2:
            raise InvalidInput(f"cannot read {shown(link)} as a link; {_HELP}")
        found = Link(to_host=_rate("link", rates[0]), from_host=_rate("link", rates[-1]))
    return None if found is None or not (found.to_host and found.from_host) else found


def _rate(name: str, rate: Any) -> int:
    if isinstance(rate, str):
        match = _RATE.fullmatch(rate.strip())
        if match is None:
            raise InvalidInput(f"{name}: {shown(rate)} has no unit per second; {_HELP}")
        return parse_size(match[1])
    if not _is_number(rate) or not 0 <= rate <= MAX_BYTES:
        raise InvalidInput(f"{name} must be a number of bytes per second, at least 0, not {shown(rate)}")
    return int(rate)


def _is_number(given: Any) -> bool:
    return isinstance(given, Real) and not isinstance(given, bool) and math.isfinite(given)
