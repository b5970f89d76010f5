"""The judge: meets, falls short, not measured, refuses."""

import pytest

from bench import compare
from bench.cases import tagged

CASE, OTHER = "cpu-fp32-d64-n4096-full", "cpu-fp32-d64-n4096-causal"


def result(contestant, ms, *, case=CASE, run="r1", status="green", **more):
    timing = {"median_ms": ms, "noise": 0.01} if contestant == "portable" else {"median_ms": ms}
    timed = {"forward": timing, "both": timing} if status in ("green", "loose") else {}
    head = {"record": "entry", "run": run, "case": case, "contestant": contestant, "status": status}
    return head | {"memory": {"extra_bytes": 10 << 20}} | timed | more


def goal(**changes):
    row = {"case": CASE, "direction": "forward", "contestant": "portable", "peer": "sdpa", "ratio": 0.5}
    return compare.Goal(**(row | changes))


def judged(a_goal, *results):
    (verdict,) = compare.judge([a_goal], list(results))
    return verdict


def test_meets_exactly_at_the_ratio_and_falls_short_below():
    assert judged(goal(), result("portable", 2.0), result("sdpa", 1.0)).says == "meets"
    short = judged(goal(), result("portable", 2.01), result("sdpa", 1.0))
    assert (short.says, short.noise) == ("falls short", 0.01)
    assert short.measured == pytest.approx(1 / 2.01)


def test_those_asked_are_all_that_the_goals_compare():
    memory = goal(direction="memory", contestant="portable", peer=None, ratio=None, mib=64, case=OTHER)
    goals = [memory, goal(), goal(contestant="cpu", peer="cpu", peer_case=OTHER)]
    ((case, other),) = compare.asked(goals)
    assert (other.case, other.contestants, other.untimed) == (OTHER, ("portable", "cpu"), {"portable"})
    assert (case.case, case.contestants, case.untimed) == (CASE, ("portable", "sdpa", "cpu"), frozenset())
    results = [result(name, 1.0, case=row.case) for row in (other, case) for name in row.contestants]
    assert [v.says for v in compare.judge(goals, results)].count("not measured") == 0


def test_refuses_when_the_peer_ran_in_another_process():
    with pytest.raises(compare.Refused, match="did not run in the same process"):
        judged(goal(), result("portable", 1.0), result("sdpa", 1.0, run="r2"))


def test_the_newest_run_that_has_both_is_judged():
    old = [result("portable", 9.0), result("sdpa", 1.0)]
    new = [result("portable", 1.0, run="r2"), result("sdpa", 1.0, run="r2")]
    alone = [result("portable", 9.0, run="r3")]
    assert judged(goal(), *old, *new, *alone).measured == 1.0


def test_a_red_contestant_falls_short_and_a_red_peer_is_no_measure():
    red = judged(goal(), result("portable", 0, status="red"), result("sdpa", 1.0))
    assert (red.says, red.measured) == ("falls short", None)
    assert "its check is red" in red.why
    assert judged(goal(), result("portable", 1.0), result("sdpa", 0, status="red")).says == "not measured"
    assert judged(goal(), result("portable", 1.0), result("sdpa", 1.0, status="loose")).says == "meets"


def test_a_refused_contestant_falls_short_with_its_reasons():
    refused = result("portable", 0, status="refused", why=["head_dim 640 is above 512"])
    verdict = judged(goal(), refused, result("sdpa", 1.0))
    assert verdict.says == "falls short"
    assert "head_dim 640" in verdict.why


def test_missing_results_are_not_measured():
    verdict = judged(goal(), result("sdpa", 1.0))
    assert (verdict.says, verdict.measured) == ("not measured", None)


def test_a_peer_case_compares_two_cases_of_one_process():
    a_goal = goal(case=OTHER, peer="portable", peer_case=CASE, ratio=1.667)
    full, causal = result("portable", 10.0), result("portable", 5.9, case=OTHER)
    assert judged(a_goal, full, causal).says == "meets"
    assert judged(a_goal, full, result("portable", 6.1, case=OTHER)).says == "falls short"
    with pytest.raises(compare.Refused):
        judged(a_goal, full, result("portable", 5.9, case=OTHER, run="r2"))


def test_a_tag_is_judged_by_the_geometric_mean_of_all_its_cases():
    a_goal = goal(case=None, tag="h200", contestant="tilewise", peer="cudnn", ratio=1.0)
    cases = [c.name for c in tagged("h200")]
    ours = [result("tilewise", 1.0 if i % 2 else 4.0, case=c) for i, c in enumerate(cases)]
    peers = [result("cudnn", 2.0, case=c) for c in cases]
    assert judged(a_goal, *ours, *peers).measured == pytest.approx(1.0)
    assert judged(a_goal, *ours[1:], *peers).says == "not measured"


def test_memory_is_judged_without_a_peer():
    a_goal = goal(direction="memory", peer=None, ratio=None, mib=10.0)
    assert judged(a_goal, result("portable", 1.0)).says == "meets"
    over = result("portable", 1.0) | {"memory": {"extra_bytes": (10 << 20) + 1}}
    assert judged(a_goal, over).says == "falls short"


def test_goals_that_make_no_sense_are_refused_with_every_reason():
    with pytest.raises(ValueError, match=r"direction is 'sideways'.*give either case or tag.*needs peer and ratio"):
        goal(direction="sideways", tag="h200", peer=None)


def test_the_goals_of_the_repository_name_cases_of_the_table():
    goals = compare.load_goals()
    assert {g.direction for g in goals} >= {"forward", "both", "memory"}


def test_a_rule_is_a_goal_for_each_case_and_direction():
    cases = "cpu-{fp32,bf16}-d64-n8192-{full,causal}"
    rule = compare.Rule(cases=cases, contestant="cpu", peer="sdpa", forward=[1.0, 2.0, 3.0, 4.0], backward=0.5)
    found = [(g.case, g.direction, g.ratio) for g in rule.goals()]
    names = [
        "cpu-fp32-d64-n8192-full",
        "cpu-fp32-d64-n8192-causal",
        "cpu-bf16-d64-n8192-full",
        "cpu-bf16-d64-n8192-causal",
    ]
    assert [x for x in found if x[1] == "forward"] == [
        (n, "forward", r) for n, r in zip(names, (1.0, 2.0, 3.0, 4.0), strict=True)
    ]
    assert [x for x in found if x[1] == "backward"] == [(n, "backward", 0.5) for n in names]


def test_a_rules_peer_cases_go_with_its_cases_one_by_one():
    options = {"contestant": "hopper", "peer": "hopper", "forward": 1.0}
    rule = compare.Rule(cases="cuda-d96-n4096-{full,causal}", peer_case="h200-d64-n4096-{full,causal}", **options)
    assert [(g.case, g.peer_case) for g in rule.goals()] == [
        (f"cuda-d96-n4096-{mask}", f"h200-d64-n4096-{mask}") for mask in ("full", "causal")
    ]
    (mean,) = compare.Rule(tag="h200", **options).goals()
    assert (mean.case, mean.tag, len(mean.cases)) == (None, "h200", 36)


def test_a_rule_that_makes_no_sense_is_refused():
    options = {"cases": "cpu-fp32-d64-n8192-{full,causal}", "contestant": "cpu", "peer": "sdpa"}
    with pytest.raises(ValueError, match="3 values for 2 cases"):
        list(compare.Rule(forward=[1.0, 2.0, 3.0], **options).goals())
    with pytest.raises(ValueError, match="give forward, backward, both or mib"):
        list(compare.Rule(**options).goals())
