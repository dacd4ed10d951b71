"""Processes of a comparison: pinned to cores, awaited, weighed and ended by their own ids."""

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request


class Failed(Exception):
    """Something did not start or did not answer; the text says what and where to look."""


def free_ports(count):
    """Ports that nobody listens on now."""
    held = [socket.socket() for _ in range(count)]
    for one in held:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


def page(url, timeout_s=5):
    """The body of a page that answers 200, else None."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return answer.read().decode("utf-8", "replace") if answer.status == 200 else None
    except (urllib.error.URLError, OSError):
        return None


def asked(url, body, timeout_s=10):
    """Whether a JSON request is answered with 200."""
    request = urllib.request.Request(url, body.encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            answer.read()
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def cpu_us(pids):
    """Processor time of living threads and dead ones, in ticks of 10 ms."""
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
            fields = stat.read().rsplit(")", 1)[1].split()
        total += (int(fields[11]) + int(fields[12])) * 10_000
    return total


def memory_mb(pid):
    """Resident memory now and at its highest."""
    with open(f"/proc/{pid}/status", encoding="utf-8") as status:
        rows = dict(line.split(":", 1) for line in status if ":" in line)
    return tuple(round(int(rows[name].split()[0]) / 1024, 1) for name in ("VmRSS", "VmHWM"))


def children(pid):
    """Processes that a process has started and that live."""
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children", encoding="utf-8") as listed:
            found += [int(child) for child in listed.read().split()]
    return found


class Group:
    """Processes that are started together and ended together, whatever happens."""

    def __init__(self, folder):
        self.folder = folder
        self.started = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()

    def start(self, name, cores, words):
        """Starts a process on `cores`; its output is FOLDER/NAME.log."""
        path = os.path.join(self.folder, f"{name}.log")
        with open(path, "ab") as log:
            process = subprocess.Popen(["taskset", "-c", cores, *words], stdin=subprocess.PIPE, stdout=log,
                                       stderr=subprocess.STDOUT, start_new_session=True)
        self.started.append((name, process, path))
        return process

    def check(self):
        """Fails when one has ended by itself."""
        for name, process, path in self.started:
            if process.poll() is not None:
                with open(path, encoding="utf-8", errors="replace") as log:
                    tail = "".join(log.readlines()[-5:])
                raise Failed(f"{name} ended with {process.returncode}: {tail.strip()}")

    def until(self, what, ready, seconds=60):
        """Waits until `ready()`."""
        end = time.monotonic() + seconds
        while not ready():
            self.check()
            if time.monotonic() > end:
                raise Failed(f"{what}: not ready after {seconds} s; logs are in {self.folder}")
            time.sleep(0.2)

    def end(self):
        """Ends them, the last first: politely, then not."""
        for _, process, _ in reversed(self.started):
            process.stdin.close()
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for _, process, _ in reversed(self.started):
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                # It leads a group of its own, in which only what it started can be.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self.started.clear()
