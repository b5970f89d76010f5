"""The judge: goals.toml against a file of results. It reads, it does not measure."""

import math
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from bench import records
from bench.cases import named, tagged
from bench.records import Refused

GOALS = Path(__file__).with_name("goals.toml")
DIRECTIONS = ("forward", "backward", "both", "memory")


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A ratio (or a bound of memory) that a contestant must reach in one direction of a case, or in the mean of a tag's cases."""

    direction: str
    contestant: str
    case: str | None = None
    tag: str | None = None
    peer: str | None = None
    peer_case: str | None = None
    ratio: float | None = None
    mib: float | None = None

    def __post_init__(self):
        wrong = []
        if self.direction not in DIRECTIONS:
            wrong.append(f"direction is {self.direction!r}, not one of {', '.join(DIRECTIONS)}")
        if (self.case is None) == (self.tag is None):
            wrong.append("give either case or tag")
        if self.direction == "memory" and self.mib is None:
            wrong.append("a memory goal needs mib")
        if self.direction != "memory" and (self.ratio is None or self.peer is None):
            wrong.append("a speed goal needs peer and ratio")
        if self.tag and self.peer_case:
            wrong.append("a tag's cases are compared with themselves: no peer_case")
        if wrong:
            raise ValueError(f"goal {self.name}: {'; '.join(wrong)}")

    @property
    def name(self) -> str:
        return f"{self.case or f'[{self.tag}]'} {self.direction}"

    @property
    def cases(self) -> list[str]:
        return [self.case] if self.case else [case.name for case in tagged(self.tag)]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule of goals.toml: a goal for each of its cases and directions. The comments at its top say what each field means."""

    contestant: str
    cases: str | list[str] | None = None
    tag: str | None = None
    peer: str | None = None
    peer_case: str | None = None
    forward: float | list[float] | None = None
    backward: float | list[float] | None = None
    both: float | list[float] | None = None
    mib: float | None = None

    def goals(self) -> Iterator[Goal]:
        """Its goals, case by case. Raises ValueError where a list is not as long as the cases."""
        patterns = [self.cases] if isinstance(self.cases, str) else self.cases or []
        names = [name for pattern in patterns for name in expanded(pattern)] or [None]
        peers = self._each(expanded(self.peer_case) if self.peer_case else [None], len(names))
        given = {"forward": self.forward, "backward": self.backward, "both": self.both, "memory": self.mib}
        asked = {name: x if isinstance(x, list) else [x] for name, x in given.items() if x is not None}
        if not asked:
            raise ValueError(f"goals of {self.cases or self.tag}: give forward, backward, both or mib")
        bounds = {name: self._each(values, len(names)) for name, values in asked.items()}
        shared = {"contestant": self.contestant, "tag": self.tag, "peer": self.peer}
        for n, (case, peer_case) in enumerate(zip(names, peers, strict=True)):
            for name, values in bounds.items():
                bound = {"mib" if name == "memory" else "ratio": values[n]}
                yield Goal(direction=name, case=case, peer_case=peer_case, **shared, **bound)

    def _each(self, values: list, count: int) -> list:
        """One value for each case: as many as there are cases, or one for all."""
        if len(values) not in (1, count):
            raise ValueError(f"goals of {self.cases or self.tag}: {len(values)} values for {count} cases")
        return values if len(values) == count else values * count


def expanded(pattern: str) -> list[str]:
    """The names that a pattern stands for: ``a{b,c}{d,e}`` for abd, abe, acd and ace, in this order."""
    texts = re.split(r"\{(.*?)\}", pattern)
    choices = [part.split(",") if n % 2 else [part] for n, part in enumerate(texts)]
    return ["".join(words) for words in product(*choices)]


@dataclass(frozen=True)
class Asked:
    """Who has to run a case so that goals can be judged, and who of them for his memory alone."""

    case: str
    contestants: tuple[str, ...]
    untimed: frozenset[str]


@dataclass(frozen=True)
class Verdict:
    """meets, falls short, or not measured; the ratio (or MiB) that was measured, and the noise beside it."""

    goal: Goal
    says: str
    measured: float | None = None
    noise: float | None = None
    why: str = ""


def load_goals() -> list[Goal]:
    """The goals of :data:`GOALS`. Raises ValueError for a rule that makes no sense or names an unknown case."""
    groups = tomllib.loads(GOALS.read_text())["goals"]
    rules = [
        Rule(**{name: x for name, x in group.items() if name != "rules"}, **row)
        for group in groups
        for row in group["rules"]
    ]
    goals = [goal for rule in rules for goal in rule.goals()]
    for goal in goals:
        for name in (*goal.cases, *([goal.peer_case] if goal.peer_case else [])):
            named(name)
    return goals


def asked(goals: Iterable[Goal]) -> list[list[Asked]]:
    """Every case that goals name, in their order, with the contestants and peers that they ask for; cases that a goal
    compares with one another as one group."""
    goals = list(goals)
    timed: dict[str, dict[str, bool]] = {}

    def ask(case: str, name: str, for_time: bool) -> None:
        names = timed.setdefault(case, {})
        names[name] = names.get(name, False) or for_time

    for goal in goals:
        for case in goal.cases:
            ask(case, goal.contestant, goal.peer is not None)
            if goal.peer:
                ask(goal.peer_case or case, goal.peer, True)
    rows = {case: Asked(case, tuple(who), frozenset(n for n in who if not who[n])) for case, who in timed.items()}
    return [[rows[case] for case in group] for group in compared(goals)]


def compared(goals: Iterable[Goal]) -> list[list[str]]:
    """The goals' cases in their order, those that a goal compares with one another as one group."""
    groups: dict[str, list[str]] = {}  # of every case, shared by those of a group
    for goal in goals:
        for case in goal.cases:
            other = goal.peer_case or case
            together = groups.setdefault(case, [case])
            for name in groups.get(other, [other]):
                if name not in together:
                    together.append(name)
                groups[name] = together
    return list({id(group): group for group in groups.values()}.values())


def read_results(path: Path) -> list[dict]:
    """The entries of a file of results: all that each contestant did. Raises Refused for any other file."""
    return records.entries(records.read(path))


def judge(goals: Iterable[Goal], results: list[dict]) -> list[Verdict]:
    """A verdict for each goal. Raises Refused where a contestant and its peer never ran in the same process."""
    return [_judge(goal, results) for goal in goals]


def _judge(goal: Goal, results: list[dict]) -> Verdict:
    pairs = [_pair(goal, case, results) for case in goal.cases]
    missing = [case for case, pair in zip(goal.cases, pairs, strict=True) if pair is None]
    if missing:
        return Verdict(goal, "not measured", why=f"no result of {missing[0]}")
    for mine, peer in pairs:
        if mine["status"] != "green":
            return Verdict(goal, "falls short", why=f"{mine['contestant']} on {mine['case']}: {_reason(mine)}")
        if peer is not None and goal.direction not in peer:
            return Verdict(goal, "not measured", why=f"{peer['contestant']} on {peer['case']}: {_reason(peer)}")
        if goal.direction not in mine:
            return Verdict(goal, "not measured", why=f"{mine['case']} has no {goal.direction}")
    if goal.direction == "memory":
        mib = max(mine["memory"]["extra_bytes"] for mine, _ in pairs) / 2**20
        return Verdict(goal, "meets" if mib <= goal.mib else "falls short", mib)
    ratios = [peer[goal.direction]["median_ms"] / mine[goal.direction]["median_ms"] for mine, peer in pairs]
    mean = math.exp(sum(math.log(r) for r in ratios) / len(ratios))
    noise = max((mine[goal.direction].get("noise", 0.0) for mine, _ in pairs), default=None)
    return Verdict(goal, "meets" if mean >= goal.ratio else "falls short", mean, noise)


def _reason(result: dict) -> str:
    if result["status"] == "red":
        return "its check is red, so it was not timed"
    return "; ".join(result.get("why", [])) or f"status {result['status']}"


def _pair(goal: Goal, case: str, results: list[dict]) -> tuple[dict, dict | None] | None:
    """The newest results of the contestant and its peer that share a process, and were asked for this direction where there are
    such; None where one was not measured."""
    mine = _find(results, case, goal.contestant)
    if goal.peer is None:
        return (mine[-1], None) if mine else None
    peers = _find(results, goal.peer_case or case, goal.peer)
    if not mine or not peers:
        return None
    together = [(m, p) for m in mine for p in peers if m["run"] == p["run"]]
    if not together:
        raise Refused(
            f"{goal.name}: {goal.contestant} and {goal.peer} did not run in the same process; "
            "times of different processes are not compared"
        )
    asked = [(m, p) for m, p in together if m["status"] != "green" or goal.direction in m]
    return (asked or together)[-1]


def _find(results: list[dict], case: str, contestant: str) -> list[dict]:
    return [r for r in results if r["case"] == case and r["contestant"] == contestant]
