#!/usr/bin/env python3
"""Tries the dashboard and the rules of deploy/observability with a real Prometheus before a real `baton up`.

Each query must be answered, and those of the dashboard with data, but for what did not happen.
Usage: scripts/observability.py BATON
"""

import json
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request

KIT = pathlib.Path(__file__).resolve().parent.parent / "deploy" / "observability"
# In a minute of good service nothing is refused and nothing fails.
MAY_BE_EMPTY = ("baton_requests_refused_total", "baton_requests_failed_total")


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def get(url, body=None, timeout=30):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.loads(answer.read() or "null")


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
        subprocess.run(["promtool", "check", "config", path], check=True)
        programs = [
            subprocess.Popen([baton, "up", "--listen", f"127.0.0.1:{port}"], stdout=subprocess.DEVNULL),
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


def answer(port, prometheus_port):
    door, prometheus = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{prometheus_port}"
    wait_for(f"{door}/ready", 60)
    wait_for(f"{prometheus}/-/ready", 60)
    model = get(f"{door}/v1/models")["data"][0]["id"]
    until = time.time() + 25
    served = 0
    while time.time() < until:
        text = f"Tell me about number {served}. " * 40
        body = {"model": model, "max_tokens": 12, "messages": [{"role": "user", "content": text}]}
        get(f"{door}/v1/chat/completions", body)
        served += 1
    print(f"observability: {served} answers")
    broken = []
    for title, expr, has_data in queries():
        reply = get(f"{prometheus}/api/v1/query?" + urllib.parse.urlencode({"query": expr}))
        values = [sample["value"][1] for sample in reply["data"]["result"]]
        if reply["status"] != "success" or (has_data and not any(value != "NaN" for value in values)):
            broken.append(f"{title}: {expr}: {values or 'no data'}")
    for group in get(f"{prometheus}/api/v1/rules")["data"]["groups"]:
        for rule in group["rules"]:
            if rule["health"] != "ok":
                broken.append(f"{rule['name']}: {rule.get('lastError', rule['health'])}")
            if rule.get("state") == "firing":
                broken.append(f"{rule['name']} fires although all is well")
    # The page and Prometheus count alike.
    page = wait_for(f"{door}/metrics", 5).decode()
    in_slo = sum(float(line.split()[-1]) for line in page.splitlines()
                 if re.match(r'baton_slo_requests_total\{.*outcome="(in_slo|late_ttft|late_tbt|late_e2e)"', line))
    if in_slo != served:
        broken.append(f"{served} answers were served, and the page counts {in_slo}")
    if broken:
        sys.exit("observability: " + "\nobservability: ".join(broken))
    print("observability: every query of the dashboard and every rule has its answer")


if __name__ == "__main__":
    main()
