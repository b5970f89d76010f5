"""A pytest plugin (``-p tests.gpu.lines --lines FILE --lines-job NAME``): a JSON line for each test as soon as it has ended."""

import json


def pytest_addoption(parser):
    parser.addoption("--lines", help="append the lines to this file")
    parser.addoption("--lines-job", default="tests", help="the lines' part and job")


def pytest_configure(config):
    if config.getoption("--lines") and not hasattr(config, "workerinput"):  # under xdist only where all reports come in
        config.pluginmanager.register(_Lines(config.getoption("--lines"), config.getoption("--lines-job")))


class _Lines:
    def __init__(self, path: str, job: str):
        self.path, self.job = path, job

    def pytest_runtest_logreport(self, report):
        if report.when != "call" and report.outcome == "passed":
            return
        state = {"passed": "ok", "failed": "wrong"}.get(report.outcome, report.outcome)
        row = {
            "part": self.job,
            "job": self.job,
            "item": report.nodeid,
            "state": state,
            "seconds": round(report.duration, 2),
        }
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row | {"detail": str(report.longrepr or "")[-600:]}) + "\n")
