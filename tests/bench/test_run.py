"""A wrong contestant is never timed; results say all that a judge needs."""

import json

import pytest

from bench import measure, records, run
from bench.cases import draw, named
from bench.peers import Contestant, eager_call

PLAN = run.Plan(budget=0.0, min_rounds=2, max_rounds=2)


@pytest.fixture(autouse=True)
def _cheap_limits(monkeypatch):
    monkeypatch.setattr(run.measure, "limits", lambda device, dtype: {"matmul_flops": 1e11, "copy_bytes": 1e10})


def contestant(name="right", prepare=eager_call, refuses=(), ours=True):
    return Contestant(name, lambda case, device: list(refuses), prepare, "test", ours=ours)


def entries(lineups, plan):
    return records.entries(run.run_group(lineups, plan))


class Counted:
    """Eager attention, wrong by `error`, that counts its calls at the case's own size."""

    def __init__(self, error=0.0, seqlen=None):
        self.error, self.seqlen, self.calls = error, seqlen, 0

    def __call__(self, x):
        call = eager_call(x)

        def counted():
            self.calls += x.case.seqlen_q == self.seqlen
            return call() + self.error

        return counted


def test_a_red_contestant_is_checked_once_and_never_timed():
    case = named("contract-n129-causal")
    wrong = Counted(error=0.01, seqlen=129)
    # The warm-up runs at 128: at 129 there is the one call that is checked.
    red, green = entries([run.Lineup(case, [contestant("wrong", wrong), contestant()])], PLAN)
    assert red["status"] == "red"
    assert not {"forward", "backward", "both"} & set(red)
    assert wrong.calls == 1
    assert [why.partition(":")[0] for why in red["why"]] == ["o"]
    assert green["status"] == "green"
    assert green["forward"]["median_ms"] > 0


def test_a_red_peer_is_not_timed_either():
    (found,) = entries(
        [run.Lineup(named("contract-n63-full"), [contestant("peer", Counted(error=0.1), ours=False)])], PLAN
    )
    assert found["status"] == "red"
    assert "forward" not in found


def test_wrong_gradients_are_red():
    def wrong_gradient(x):
        call = eager_call(x)

        def doubled():
            o = call()
            o.register_hook(lambda g: 2 * g)
            return o

        return doubled

    (found,) = entries([run.Lineup(named("contract-n63-full"), [contestant("wrong", wrong_gradient)])], PLAN)
    assert found["status"] == "red"
    assert {why.partition(":")[0] for why in found["why"]} == {"dq", "dk", "dv"}


def test_refusals_and_failures_are_recorded_and_do_not_stop_the_others():
    def raises(x):
        raise NotImplementedError("cannot run this\n  head_dim 16 is odd")

    def breaks(x):
        raise RuntimeError("out of luck\nsecond line")

    crowd = [contestant("declares", refuses=["no causal"]), contestant("raises", raises), contestant("breaks", breaks)]
    declared, raised, broke, right = entries([run.Lineup(named("contract-n63-causal"), [*crowd, contestant()])], PLAN)
    assert (declared["status"], declared["why"]) == ("refused", ["no causal"])
    assert (raised["status"], raised["why"]) == ("refused", ["cannot run this", "head_dim 16 is odd"])
    assert (broke["status"], broke["why"]) == ("failed", ["RuntimeError: out of luck"])
    assert right["status"] == "green"


def test_a_result_says_nothing_of_where_the_checkout_was():
    refuses = [f"no kernels in {measure.ROOT}/src/tilewise"]
    entry = run.Entry(contestant(), draw(named("contract-one-full")), refused=refuses)
    assert entry.why == ["no kernels in src/tilewise"]


def test_contestants_take_turns_and_the_order_turns_with_the_rounds(monkeypatch):
    order = []

    def named_call(name):
        def prepare(x):
            call = eager_call(x)

            def noted():
                order.append(name)
                return call()

            return noted

        return prepare

    x = draw(named("contract-decode-full"))
    entries = [run.Entry(contestant(n, named_call(n)), x, named_call(n)(x)) for n in "ab"]
    for entry in entries:
        entry.seconds = {d: [1.0] for d in ("forward", "backward", "both")}
    monkeypatch.setattr(run, "first_sample", lambda *_: 0.0)  # the calibration is not what is tested
    run.time_rounds(entries, run.Plan(budget=60.0, min_rounds=3, max_rounds=3))
    forward_order = [name for name, before in zip(order, ["", *order], strict=False) if name != before]
    assert forward_order == ["b", "a", "b"]


def test_a_very_long_case_stops_after_one_round():
    plan = run.Plan(budget=10.0, min_rounds=3, max_rounds=30)
    assert run._enough(1, 41.0, plan)
    assert not run._enough(1, 39.0, plan)
    assert not run._enough(2, 11.0, plan)
    assert run._enough(3, 11.0, plan)
    assert run._enough(30, 0.1, plan)


def test_results_have_timings_noise_memory_bounds_and_what_was_checked():
    found = run.run_group([run.Lineup(named("contract-gqa-causal"), [contestant()])], PLAN)
    error, memory, *times = (r for r in found if r["contestant"] == "right")
    assert (error["metric"], error["status"]) == ("error", "green")
    assert error["checked"].startswith("every query")
    assert [r["pass"] for r in times] == ["forward", "backward", "both"]
    assert all({"low", "high", "rounds", "calls", "tflops", "noise"} <= set(r) for r in times)
    outputs = 4 * 65 * 2 * 16 * (6 + 6 + 2 + 2) / records.MIB
    assert memory["value"] == pytest.approx(max(0, memory["peak"] - outputs))
    bounds = {r["pass"]: r["value"] for r in records.select(found, contestant="bound")}
    assert bounds["both"] == pytest.approx(bounds["forward"] + bounds["backward"], abs=2e-6)
    json.dumps(found)


def test_a_case_without_backward_has_no_backward_time():
    case = named("cpu-fp32-decode-32k")
    (found,) = entries([run.Lineup(case, [contestant()])], run.Plan(budget=0.0, min_rounds=1, max_rounds=1))
    assert found["status"] == "green"
    assert "forward" in found
    assert not {"backward", "both"} & set(found)


def test_a_limit_is_timed_and_not_checked():
    case = named("cpu-fp32-decode-32k")
    (read,) = run.pick(["read"])
    (found,) = entries([run.Lineup(case, [read])], run.Plan(budget=0.0, min_rounds=1, max_rounds=1, again=False))
    assert found["status"] == "limit"
    assert found["forward"]["median_ms"] > 0
    assert read.unsupported(named("cpu-fp32-d64-n1024-full"), "cpu")


def test_cases_that_are_compared_are_timed_in_the_same_rounds(monkeypatch):
    order, sample = [], run.one_sample
    monkeypatch.setattr(run, "one_sample", lambda e, device: (order.append(e.x.case.name), sample(e, device))[1])
    names = ("contract-n63-full", "contract-n63-causal")
    found = entries([run.Lineup(named(n), [contestant()]) for n in names], PLAN)
    assert [r["case"] for r in found] == list(names)
    assert sorted(order[-4:]) == sorted(names * 2)  # the last round: a contestant of each case, and once more


def test_whoever_is_asked_for_memory_alone_is_checked_and_not_timed():
    who = [contestant("weighed"), contestant("timed")]
    weighed, timed = entries([run.Lineup(named("contract-n63-full"), who, frozenset({"weighed"}))], PLAN)
    assert (weighed["status"], timed["status"]) == ("green", "green")
    assert weighed["memory"]["peak_bytes"] > 0
    assert "forward" not in weighed
    assert timed["forward"]["median_ms"] > 0


def test_a_file_begins_with_its_run_and_every_result_names_the_process(tmp_path):
    path = tmp_path / "new" / "results.jsonl"
    records.append(run.run([[run.Lineup(named("contract-one-full"), [contestant()])]], PLAN), path)
    head, *results = records.read(path)
    assert head["record"] == "run"
    assert {"when", "device", "threads", "versions", "peers", "commit", "plan"} <= set(head)
    assert results
    assert {r["run"] for r in results} == {head["run"]}


def test_unknown_contestants_are_refused_with_the_known(monkeypatch):
    monkeypatch.setattr(run, "all_contestants", lambda: {"eager": contestant("eager")})
    with pytest.raises(ValueError, match=r"no contestant is called flesh; there are eager"):
        run.pick(["eager", "flesh"])


def test_what_fits_the_time_is_begun_short_cases_first_at_the_pace_of_the_one_before(monkeypatch):
    clock = iter([0.0, 0.0, 4.0, 4.0, 12.0, 12.0])  # two seconds a piece of work: the third would end at 30
    monkeypatch.setattr(run.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(run, "work", lambda group: group)
    assert list(run.timely([9.0, 2.0, 4.0], 25.0)) == [2.0, 4.0]


def test_work_grows_with_the_case_and_with_whoever_runs_it():
    work = lambda case, *who: run.work([run.Lineup(named(case), run.pick(who))])  # noqa: E731
    short, long = "cpu-fp32-d64-n2048-full", "cpu-fp32-d64-n8192-full"
    assert work(short, "cpu") < work(short, "cpu", "portable") < work(long, "cpu")
    assert work("contract-empty-batch-full", "cpu") > 0
