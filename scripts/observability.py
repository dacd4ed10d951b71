#!/usr/bin/env python3
"""Tries the dashboard and the rules of deploy/observability with a real Prometheus before a real `baton up`.

Each query must be answered, and those of the dashboard with data, but for what did not happen. The counts of two
classes in Prometheus must be those of the client, and the attained share of the rules within 1 %.
Usage: scripts/observability.py BATON
"""

import json
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request

KIT = pathlib.Path(__file__).resolve().parent.parent / "deploy" / "observability"
# Nothing fails in good service.
MAY_BE_EMPTY = ("baton_requests_failed_total",)
CLASSES = """
[[scheduler.classes]]
name = "interactive"
ttft = "5s"
tbt = "1s"
[[scheduler.classes]]
name = "batch"
ttft = "60s"
tbt = "1s"
target = "95%"
"""
TTFT_S = {"interactive": 5, "batch": 60}


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def call(url, body=None, **headers):
    """Status and text of the answer."""
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, body, {"content-type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def get(url, body=None):
    status, text = call(url, body)
    assert status == 200, (url, status, text)
    return text


def wait_for(url, seconds):
    until = time.time() + seconds
    while True:
        try:
            return urllib.request.urlopen(url, timeout=5).read()
        except OSError:
            if time.time() > until:
                sys.exit(f"observability: nothing answers at {url}")
            time.sleep(0.2)


def queries():
    """Each query of the kit with whether it must have data."""
    dashboard = json.loads((KIT / "dashboard.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            expr = target["expr"].replace("$__rate_interval", "20s")
            yield panel["title"], expr, not any(name in expr for name in MAY_BE_EMPTY)


def main():
    baton = sys.argv[1] if len(sys.argv) == 2 else sys.exit(__doc__)
    for program in ("prometheus", "promtool"):
        if not shutil.which(program):
            sys.exit(f"observability: there is no '{program}'; apt-get install prometheus")
    subprocess.run(["promtool", "check", "rules", KIT / "rules.yml"], check=True)
    subprocess.run(["promtool", "test", "rules", KIT / "rules-test.yml"], check=True)
    port, prometheus_port = free_port(), free_port()
    with tempfile.TemporaryDirectory() as folder:
        config = (KIT / "prometheus.yml").read_text()
        assert "127.0.0.1:8080" in config and "5s" in config
        config = config.replace("127.0.0.1:8080", f"127.0.0.1:{port}").replace("5s", "1s")
        config = config.replace("[rules.yml]", json.dumps([str(KIT / "rules.yml")]))
        path = pathlib.Path(folder) / "prometheus.yml"
        path.write_text(config)
        classes = pathlib.Path(folder) / "classes.toml"
        classes.write_text(CLASSES)
        subprocess.run(["promtool", "check", "config", path], check=True)
        programs = [
            subprocess.Popen([baton, "up", "--config", classes, "--listen", f"127.0.0.1:{port}"], stdout=subprocess.DEVNULL),
            subprocess.Popen(
                ["prometheus", f"--config.file={path}", f"--storage.tsdb.path={folder}/data",
                 f"--web.listen-address=127.0.0.1:{prometheus_port}", "--log.level=warn"]),
        ]
        try:
            answer(port, prometheus_port)
        finally:
            for program in programs:
                program.terminate()
            for program in programs:
                program.wait(30)


def ask(door, name, number):
    """Asks as a client of the class does, and says how it ended."""
    text = f"Tell me about number {number}. " * 40
    body = {"max_tokens": 12, "messages": [{"role": "user", "content": text}]}
    begun = time.monotonic()
    status, text = call(f"{door}/v1/chat/completions", json.dumps(body).encode(), x_slo_class=name)
    if status in (400, 429):
        return "refused"
    assert status == 200, text
    return "in_slo" if time.monotonic() - begun <= TTFT_S[name] else "late_ttft"


def load(door):
    """Requests of both classes for 25 s, some of batch refused; how they ended, by class."""
    ends = {name: [] for name in TTFT_S}
    in_force = get(f"{door}/admin/policy")
    until = time.time() + 25
    while time.time() < until:
        refuses = len(ends["batch"]) % 10 == 9
        if refuses:
            get(f"{door}/admin/policy", in_force.replace("ttft_us = 60000000", "ttft_us = 1000").encode())
        ends["batch"].append(ask(door, "batch", len(ends["batch"])))
        if refuses:
            assert ends["batch"][-1] == "refused", "no first token comes within a millisecond"
            get(f"{door}/admin/policy/rollback", b"")
        ends["interactive"].append(ask(door, "interactive", len(ends["interactive"])))
    return ends


def answer(port, prometheus_port):
    door, prometheus = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{prometheus_port}"
    wait_for(f"{door}/ready", 60)
    wait_for(f"{prometheus}/-/ready", 60)

    def query(expr):
        reply = json.loads(get(f"{prometheus}/api/v1/query?" + urllib.parse.urlencode({"query": expr})))
        return reply["data"]["result"]

    # What is counted before the first scrape of a series is no increase, so each class must be there before its first request.
    until = time.time() + 60
    while len(query('baton_slo_requests_total{outcome="in_slo"} == 0')) < len(TTFT_S):
        if time.time() > until:
            sys.exit(f"observability: Prometheus does not have each class at 0: {query('baton_slo_requests_total')}")
        time.sleep(0.2)
    ends = load(door)
    print(f"observability: {', '.join(f'{len(own)} answers of {name}' for name, own in ends.items())}")
    # A scrape and an evaluation of the rules after the last request.
    time.sleep(3)
    broken = []
    for title, expr, has_data in queries():
        values = [sample["value"][1] for sample in query(expr)]
        if has_data and not any(value != "NaN" for value in values):
            broken.append(f"{title}: {expr}: {values or 'no data'}")
    for group in json.loads(get(f"{prometheus}/api/v1/rules"))["data"]["groups"]:
        for rule in group["rules"]:
            if rule["health"] != "ok":
                broken.append(f"{rule['name']}: {rule.get('lastError', rule['health'])}")
            if rule.get("state") == "firing":
                broken.append(f"{rule['name']} fires although all is well")
    # Prometheus has the client's own counts.
    for name, own in ends.items():
        seen = query(f'baton_slo_requests_total{{class="{name}"}}')
        seen = {sample["metric"]["outcome"]: int(sample["value"][1]) for sample in seen}
        if seen != {outcome: own.count(outcome) for outcome in seen} or sum(seen.values()) != len(own):
            broken.append(f"{name}: the client counts {own}, Prometheus {seen}")
        share = own.count("in_slo") / len(own)
        for record in ("baton:slo_attained:ratio_rate5m", "baton:slo_attained:ratio_rate1h"):
            values = [float(sample["value"][1]) for sample in query(f'{record}{{class="{name}"}}')]
            print(f"observability: {name}: the client counts {share:.2%} in SLO, {record} has {values}")
            if not values or abs(values[0] - share) > 0.01:
                broken.append(f"{name}: the client counts {share:.2%} in SLO, and {record} has {values}")
    if broken:
        sys.exit("observability: " + "\nobservability: ".join(broken))
    print("observability: every query of the dashboard and every rule has its answer, and counts are the client's")


if __name__ == "__main__":
    main()
