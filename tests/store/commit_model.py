"""A model of the commit protocol, small enough to visit every reachable state (in the manner of TLA+).

Two operators race for attempts 1 and 2; each attempt has a coordinator and three ranks that upload in any order, also
long after their attempt was fenced. A conditional PUT that was sent may land at any later time or never; its writer may
look at the slot at any time. Coordinators crash and restart; one may give its save up; that of attempt 2 sweeps.
`without` names rules to leave out: then the search must find a violation.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

WHOLE = 3
ATTEMPTS = (1, 2)

Entry = tuple[str, int, int]
"""("A", attempt, restored attempt or 0), ("M", attempt, 0), ("X", attempt, 0): Attempt, Manifest, Aborted."""


class Writer(NamedTuple):
    """An operator (`attempt` = the one that it fences for) or a coordinator (of `attempt`).

    `known`: slots read. `put`: the claim under way, (slot, entry). `whole`: has seen all three parts.
    """

    role: str
    attempt: int
    pc: str
    known: int = 0
    put: tuple[int, Entry] | None = None
    whole: bool = False
    swept: bool = False


class State(NamedTuple):
    """`flight`: claims of the next free slot that are under way; one for an occupied slot can do nothing any more.
    `shards`: how many of the three ranks' shards are in the store, per attempt (ranks are alike)."""

    journal: tuple[Entry, ...]
    flight: frozenset[Entry]
    shards: tuple[int, int]
    writers: tuple[Writer, ...]
    acked: frozenset[int] = frozenset()
    """Attempts whose commit was acknowledged to the ranks."""


START = State(
    journal=(),
    flight=frozenset(),
    shards=(0, 0),
    writers=(
        Writer("operator", 1, "read"),
        Writer("operator", 1, "read"),
        Writer("coordinator", 1, "off"),
        Writer("coordinator", 2, "off"),
    ),
)


def violation(s: State) -> str:
    """What is wrong with a state; "" when nothing is."""
    fence, committed = 0, 0
    seen: set[Entry] = set()
    for kind, attempt, restored in s.journal:
        if (kind, attempt) in {(k, a) for k, a, _ in seen} and kind in "AM":
            return f"{kind}{attempt} stands twice"
        if kind == "A":
            fence = attempt
            if restored != committed:
                return f"attempt {attempt} starts from {restored}, the newest commit was {committed}"
        if kind == "M":
            if attempt != fence:
                return f"attempt {attempt} commits after the fence of {fence}"
            if ("X", attempt, 0) in seen:
                return f"attempt {attempt} commits after its abort"
            committed = attempt
        seen.add((kind, attempt, restored))
    for attempt in ATTEMPTS:
        if ("M", attempt, 0) in s.journal and s.shards[attempt - 1] != WHOLE:
            return f"the commit of attempt {attempt} lacks a shard"
        if attempt in s.acked and ("M", attempt, 0) not in s.journal:
            return f"the acknowledged commit of attempt {attempt} is lost"
    return ""


def successors(s: State, without: frozenset[str]) -> Iterator[tuple[str, State]]:
    yield from _network(s)
    yield from _ranks(s)
    for i, writer in enumerate(s.writers):
        step = _operator if writer.role == "operator" else _coordinator
        for name, changed, patch in step(s, writer, without):
            writers = (*s.writers[:i], changed, *s.writers[i + 1 :])
            if writers[1] < writers[0]:  # the two operators are alike
                writers = (writers[1], writers[0], *writers[2:])
            yield f"{writer.role} {i}: {name}", s._replace(writers=writers, **patch)


def _network(s: State) -> Iterator[tuple[str, State]]:
    """A claim under way lands, or never does; then the slot is occupied and the others are refused."""
    for entry in sorted(s.flight):  # the hash seed must not choose among shortest traces
        yield f"{entry} lands", s._replace(journal=(*s.journal, entry), flight=frozenset())


def _ranks(s: State) -> Iterator[tuple[str, State]]:
    """A rank of an attempt that was ever fenced uploads its shard; zombies do so after any fence."""
    for attempt in ATTEMPTS:
        there = s.shards[attempt - 1]
        if there < WHOLE and _index(s.journal, "A", attempt):
            yield f"a rank of {attempt} uploads", s._replace(shards=_set(s.shards, attempt, there + 1))


_Step = Iterator[tuple[str, Writer, dict[str, Any]]]


def _operator(s: State, w: Writer, without: frozenset[str]) -> _Step:
    if w.pc == "done":
        return
    if w.pc == "wait":
        yield from _look(s, w, without)
        return
    if w.known < len(s.journal):
        yield "reads", w._replace(known=w.known + 1), {}
        return
    seen = s.journal[: w.known]
    if _index(seen, "A", w.attempt) and "R9" not in without:
        yield "finds its attempt", _next_attempt(w), {}
        return
    pick = max((a for k, a, _ in seen if k == "M"), default=0)
    if w.attempt == 2 and not _index(seen, "A", 1):
        return
    entry = ("A", w.attempt, pick)
    yield from _send(s, w, entry)


def _coordinator(s: State, w: Writer, without: frozenset[str]) -> _Step:
    own = _index(s.journal, "A", w.attempt)
    if w.pc == "off":
        if own:
            yield "starts", w._replace(pc="read", known=own), {}
        if w.attempt == 2 and "R12" in without and not w.swept:
            yield from _sweep(s, w, s.journal)
        return
    if w.pc in ("fenced", "acked"):
        return
    yield "restarts", Writer("coordinator", w.attempt, "read", known=own, swept=w.swept), {}
    if w.attempt == 2 and not w.swept:
        yield from _sweep(s, w, s.journal[:own])
    if w.pc == "wait":
        yield from _look(s, w, without)
        return
    if not w.whole and s.shards[w.attempt - 1] == WHOLE:
        yield "sees every part", w._replace(whole=True), {}
    if w.known < len(s.journal):
        yield "reads", w._replace(known=w.known + 1), {}
        return
    seen = s.journal[: w.known]
    if any(k == "A" for k, _, _ in seen[own:]) and "R4" not in without:
        yield "is fenced", w._replace(pc="fenced"), {}
        return
    if _index(seen, "M", w.attempt) and "R2" not in without:
        yield "finds its commit", w._replace(pc="acked"), {"acked": s.acked | {w.attempt}}
        return
    if _index(seen, "X", w.attempt):
        yield "deletes its aborted save", w._replace(pc="fenced"), {"shards": _set(s.shards, w.attempt, 0)}
        return
    if w.whole:
        yield from _send(s, w, ("M", w.attempt, 0))
    yield from _send(s, w, ("X", w.attempt, 0))


def _send(s: State, w: Writer, entry: Entry) -> _Step:
    if w.known == len(s.journal):
        yield (
            f"sends {entry}",
            w._replace(pc="wait", put=(w.known + 1, entry)),
            {"flight": s.flight | {entry}},
        )
    else:  # the slot is occupied already: refused at once
        yield f"sends {entry} too late", w._replace(pc="wait", put=(w.known + 1, entry)), {}


def _look(s: State, w: Writer, without: frozenset[str]) -> _Step:
    """R1, R2: only an occupied slot decides; until then the same bytes are sent again."""
    assert w.put is not None
    slot, entry = w.put
    if len(s.journal) < slot:
        if entry not in s.flight:
            yield "sends again", w, {"flight": s.flight | {entry}}
        if "R1" in without and entry[0] == "M":  # "not there, so it failed": give up, delete
            yield "gives up", w._replace(pc="fenced", put=None), {"shards": _set(s.shards, w.attempt, 0)}
        return
    if "R3" in without and entry[0] == "X":
        yield (
            "deletes before its abort stands",
            w._replace(pc="fenced", put=None),
            {"shards": _set(s.shards, w.attempt, 0)},
        )
    if s.journal[slot - 1][:2] == entry[:2] and "R2" not in without:
        yield from _won(s, w, slot, entry)
    elif "R5" in without:  # the ready-made entry again, at the next slot
        yield from _send(s, w._replace(known=slot), entry)
    else:
        yield "was refused", w._replace(pc="read", put=None, known=slot), {}


def _won(s: State, w: Writer, slot: int, entry: Entry) -> _Step:
    if entry[0] == "A":
        yield "has fenced", _next_attempt(w._replace(known=slot)), {}
    elif entry[0] == "M":
        yield "is told of its commit", w._replace(pc="acked", put=None), {"acked": s.acked | {w.attempt}}
    else:
        yield "has aborted", w._replace(pc="read", put=None, known=slot), {}


def _sweep(s: State, w: Writer, seen: tuple[Entry, ...]) -> _Step:
    """R12: after reading through its own attempt, what attempt 1 left uncommitted goes."""
    doomed = not _index(seen, "M", 1)
    yield "sweeps", w._replace(swept=True), {"shards": _set(s.shards, 1, 0)} if doomed else {}


def _next_attempt(w: Writer) -> Writer:
    return w._replace(pc="done" if w.attempt == 2 else "read", attempt=min(2, w.attempt + 1), put=None)


def _index(journal: tuple[Entry, ...], kind: str, attempt: int) -> int:
    """Slot (from 1) of an entry, 0 when there is none."""
    return next((i for i, (k, a, _) in enumerate(journal, 1) if (k, a) == (kind, attempt)), 0)


def _set(shards: tuple[int, int], attempt: int, count: int) -> tuple[int, int]:
    return (count, shards[1]) if attempt == 1 else (shards[0], count)


@dataclass(frozen=True)
class Result:
    """`states` visited; `trace` leads to the first violation, empty when there is none."""

    states: int
    trace: tuple[str, ...] = ()
    wrong: str = ""
    committed: frozenset[int] = frozenset()
    """Attempts that commit in some state: the search is not vacuous."""


def explore(without: frozenset[str] = frozenset(), limit: int = 3_000_000) -> Result:
    """Breadth first, so that the trace to a violation is a shortest one. Raises RuntimeError above `limit` states."""
    came: dict[State, tuple[State, str] | None] = {START: None}
    queue = deque([START])
    committed: set[int] = set()
    while queue:
        state = queue.popleft()
        committed |= state.acked
        for name, following in successors(state, without):
            if following in came:
                continue
            came[following] = (state, name)
            wrong = violation(following)
            if wrong:
                return Result(len(came), _trace(came, following), wrong, frozenset(committed))
            queue.append(following)
        if len(came) > limit:
            raise RuntimeError(f"more than {limit} states")
    return Result(len(came), committed=frozenset(committed))


def _trace(came: dict[State, tuple[State, str] | None], state: State) -> tuple[str, ...]:
    names: list[str] = []
    step = came[state]
    while step is not None:
        names.append(step[1])
        step = came[step[0]]
    return tuple(reversed(names))
