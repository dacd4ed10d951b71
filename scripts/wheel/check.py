# SPDX-License-Identifier: Apache-2.0
"""Installs the wheel of the program in a fresh virtual environment, starts `baton up` from there and streams one answer.

    python3 scripts/wheel/check.py WHEEL [SECONDS]

Prints how long the first token took from the start of `baton up`, and fails above 10 s, or SECONDS. It needs no network.
"""

import http.client
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import venv

LIMIT_S = float(sys.argv[2]) if len(sys.argv) > 2 else 10.0
# The weights are random: without ignore_eos an answer may end with its first token.
CALL = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32, "stream": True, "ignore_eos": True}


def installed(wheel, folder):
    """Installs the wheel as a user does, and returns the program that is then on the PATH of the environment."""
    venv.create(folder, with_pip=True)
    pip = [folder / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-index", wheel], check=True)
    program = folder / "bin/baton"
    said = subprocess.run([program, "--version"], check=True, capture_output=True, text=True).stdout
    expected = re.search(r"baton_serve-([^-]+)-", wheel.name)[1]
    if said.split()[:2] != ["baton", expected]:
        raise SystemExit(f"wheel: {program} says {said!r}, and the wheel is of {expected}")
    return program


def stream(address):
    """Streams one answer; returns when the first token came, and how many events there were."""
    host, port = address.rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=LIMIT_S)
    connection.request("POST", "/v1/chat/completions", json.dumps(CALL), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise SystemExit(f"wheel: {answer.status} {answer.read()!r}")
    first, events = None, 0
    for line in answer:
        if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
            first = first or time.monotonic()
            events += 1
        if line.strip() == b"data: [DONE]":
            return first, events
    raise SystemExit("wheel: the stream ended without [DONE]")


def main():
    wheel = pathlib.Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        program = installed(wheel, pathlib.Path(folder) / "venv")
        config = pathlib.Path(folder) / "baton.toml"
        config.write_text('[service]\ncontrol = "127.0.0.1:0"\n')
        command = [program, "up", "--config", config, "--listen", "127.0.0.1:0"]
        begun = time.monotonic()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={"PATH": os.environ["PATH"]}) as up:
            # A service that never becomes ready is ended, and then says nothing.
            too_long = threading.Timer(6 * LIMIT_S, up.kill)
            too_long.start()
            try:
                greeting = up.stdout.readline()
                found = re.search(r"front door on http://(\S+)", greeting)
                if not found:
                    raise SystemExit(f"wheel: baton up says {greeting!r}")
                first, events = stream(found[1])
            finally:
                too_long.cancel()
                up.send_signal(signal.SIGTERM)
        if not first or events < 2 or up.returncode != 0:
            raise SystemExit(f"wheel: {events} events with text, exit status {up.returncode}")
    took = first - begun
    print(f"wheel: first token {took:.2f} s after the start of baton up, {events} events with text")
    return 0 if took < LIMIT_S else 1


if __name__ == "__main__":
    sys.exit(main())
