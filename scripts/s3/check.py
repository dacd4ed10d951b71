"""`baton store serve --cold s3://...` over an S3 service that somebody else wrote: see scripts/s3.sh.

boto3, Amazon's own client, looks at the bucket from the other side.
"""

import argparse
import contextlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import boto3
import botocore.exceptions
import redis

MIB = 1 << 20
BUCKET, PREFIX = f"baton-check-{os.getpid()}", "kv/model"


def say(what):
    print(f"s3: {what}", flush=True)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_for(what, check, seconds=60):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if check():
            return
        time.sleep(0.05)
    raise SystemExit(f"s3: {what}: not within {seconds} s")


def value(name, size):
    """Bytes that differ by name and by place."""
    start = f"{name}:".encode()
    return b"".join(start + b"%012d" % i for i in range(size // (len(start) + 12) + 1))[:size]


class Scene:
    """The service, the stores over it, and their logs."""

    def __init__(self, options):
        self.options, self.place = options, pathlib.Path(options.place)
        self.running = []
        self.environment = {
            "AWS_ACCESS_KEY_ID": "check",
            "AWS_SECRET_ACCESS_KEY": "check-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            **os.environ,
        }
        # What is on loopback is not asked for through anybody.
        self.environment = {k: v for k, v in self.environment.items() if not k.lower().endswith("_proxy")}
        self.service = options.service or self.moto()
        self.client = boto3.client(
            "s3",
            endpoint_url=self.service,
            aws_access_key_id=self.environment["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self.environment["AWS_SECRET_ACCESS_KEY"],
            region_name=self.environment["AWS_DEFAULT_REGION"],
        )

    def begin(self, name, command, environment=None):
        log = open(self.place / f"{name}.log", "ab")
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment or self.environment)
        self.running.append(process)
        return process

    def moto(self):
        port = free_port()
        server = pathlib.Path(sys.executable).with_name("moto_server")
        process = self.begin("service", [str(server), "-H", "127.0.0.1", "-p", str(port)])

        def answers():
            assert process.poll() is None, self.log("service")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return True
            return False

        wait_for("the service answers", answers)
        return f"http://127.0.0.1:{port}"

    def log(self, name):
        return (self.place / f"{name}.log").read_text(errors="replace")

    def store(self, name, *more, memory="64MiB", environment=None):
        """A store over the bucket: its process, its client, and where its metrics are."""
        port, metrics = free_port(), free_port()
        command = [str(self.options.baton), "store", "serve", "--listen", f"127.0.0.1:{port}", "--memory", memory]
        command += ["--metrics", f"127.0.0.1:{metrics}", "--cold", f"s3://{BUCKET}/{PREFIX}", "--cold-endpoint", self.service, *more]
        process = self.begin(name, command, environment)
        client = redis.Redis(port=port, socket_timeout=60)

        def answers():
            assert process.poll() is None, self.log(name)
            with contextlib.suppress(redis.ConnectionError):
                return client.ping()
            return False

        wait_for(f"the store {name}", answers)
        return process, client, f"http://127.0.0.1:{metrics}/metrics"

    def stop(self, process, how=signal.SIGTERM):
        process.send_signal(how)
        process.wait(60)

    def end(self):
        for process in self.running:
            if process.poll() is None:
                process.kill()
                process.wait()

    def objects(self):
        """Our objects in the bucket, as boto3 lists them, and their bytes."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=PREFIX + "/")
        found = [entry for page in pages for entry in page.get("Contents", ())]
        return {entry["Key"]: entry["Size"] for entry in found if entry["Key"].endswith(".kv")}


def metric(url, name):
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=10) as answer:
        text = answer.read().decode()
    return int(re.search(rf"^{name} (\d+)$", text, re.MULTILINE).group(1))


def on(url):
    wait_for("the bucket has proved itself", lambda: metric(url, "baton_objects_cold_on") == 1)


def fill(client, url, names, size):
    """Puts values and asks for each twice, as what is worth keeping is."""
    before = metric(url, "baton_objects_cold_written_total")
    names = list(names)
    for n, name in enumerate(names, 1):
        client.set(name, value(name, size))
        for _ in range(2):
            assert client.get(name) == value(name, size)
        # No more may wait than a sixteenth of the memory.
        if n * size % (2 * MIB) < size or n == len(names):
            wait_for(f"{n} values are written", lambda: metric(url, "baton_objects_cold_written_total") - before >= n)


def values(scene):
    process, client, url = scene.store("first")
    on(url)
    names = [f"block-{n}" for n in range(150)]
    fill(client, url, names, MIB)
    stored = scene.objects()
    assert len(stored) == len(names) and all(size > MIB for size in stored.values()), stored
    say(f"{len(stored)} values of 1 MiB are in the bucket, as boto3 lists it; memory has room for {64}")
    for name in names:
        assert client.get(name) == value(name, MIB), name
    hits = metric(url, "baton_objects_cold_hits_total")
    assert hits >= len(names) - 64, hits
    say(f"all are read again, {hits} of them out of the bucket")
    scene.stop(process, signal.SIGKILL)
    process, client, url = scene.store("second")
    on(url)
    assert client.exists(*names) == len(names)
    assert sorted(client.scan_iter(count=1000)) == sorted(name.encode() for name in names)
    for name in names[::7]:
        assert client.get(name) == value(name, MIB), name
    say("after kill -9 the next store finds them by the listing, SCAN names all, and every byte is right")
    return process, client, url, names


def changes(scene, process, client, url, names):
    assert client.delete(*names[:20]) == 20
    for name in names[20:30]:
        client.set(name, b"other")
        assert client.get(name) == b"other"
    fill(client, url, names[30:32], 2 * MIB)
    wait_for("what was removed is gone", lambda: len(scene.objects()) == len(names) - 30)
    scene.stop(process)
    process, client, url = scene.store("third")
    on(url)
    assert client.exists(*names[:30]) == 0, "what was removed or replaced came back"
    for name in names[30:32]:
        assert client.get(name) == value(name, 2 * MIB)
    say("what was removed is gone from the bucket, what was replaced is never found as it was, a restart included")
    return process, client, url


def pages(scene, process, client, url):
    names = [f"small-{n}" for n in range(2_300)]
    fill(client, url, names, 2_000)
    scene.stop(process)
    process, client, url = scene.store("fourth")
    on(url)
    found = {name for name in client.scan_iter(match="small-*", count=1000)}
    assert found == {name.encode() for name in names}, len(found)
    for name in names[::97]:
        assert client.get(name) == value(name, 2_000)
    say(f"{len(names)} small ones and the others, more than a page of a listing holds, are found after a restart")
    return process, client, url


def damage(scene, process, client, url, names):
    scene.stop(process)
    process, client, url = scene.store("fifth")
    on(url)
    # After the listing: what is written later than the owner before began is not believed at the next start anyway.
    stored = sorted(key for key, size in scene.objects().items() if MIB < size < 2 * MIB)
    assert len(stored) == len(names) - 32, "what was written in the second of a start was given up at the next"
    cut, other, gone = stored[:3]
    body = scene.client.get_object(Bucket=BUCKET, Key=cut)["Body"].read()
    scene.client.put_object(Bucket=BUCKET, Key=cut, Body=body[: len(body) // 2])
    body = bytearray(scene.client.get_object(Bucket=BUCKET, Key=other)["Body"].read())
    body[MIB // 2] ^= 1
    scene.client.put_object(Bucket=BUCKET, Key=other, Body=bytes(body))
    scene.client.delete_object(Bucket=BUCKET, Key=gone)
    lost = [name for name in names[32:] if client.get(name) is None]
    assert len(lost) == 3, lost
    for name in names[32:]:
        assert name in lost or client.get(name) == value(name, MIB)
    refused = metric(url, "baton_objects_cold_refused_total")
    assert refused == 3, refused
    wait_for("what is damaged is removed", lambda: not {cut, other, gone} & scene.objects().keys())
    say("an object cut short, one with a wrong bit and one that went are misses, counted and removed")
    return process, client, url


def owners(scene, process, client, url, names):
    second, other, other_url = scene.store("successor")
    on(other_url)
    wait_for("the first leaves the prefix", lambda: metric(url, "baton_objects_cold_on") == 0, 30)
    whole = next(name for name in names[40:] if other.exists(name))
    assert other.get(whole) == value(whole, MIB)
    words = [line for line in scene.log("fifth").splitlines() if "cold" in line]
    say(f"a second store takes the prefix over, and the first says: {words[-1].split('store: ', 1)[-1]}")
    scene.stop(process)
    scene.stop(second)


def strangers(scene):
    """A user that the service does not know, if it looks."""
    wrong = scene.environment | {"AWS_SECRET_ACCESS_KEY": "wrong", "AWS_ACCESS_KEY_ID": "nobody"}
    client = boto3.client(
        "s3", endpoint_url=scene.service, aws_access_key_id="nobody", aws_secret_access_key="wrong", region_name="us-east-1"
    )
    try:
        client.list_objects_v2(Bucket=BUCKET)
    except botocore.exceptions.ClientError as refusal:
        process, client, url = scene.store("stranger", environment=wrong)
        wait_for("the log says so", lambda: "cold" in scene.log("stranger"), 90)
        assert metric(url, "baton_objects_cold_on") == 0
        client.set("a", b"b")
        assert client.get("a") == b"b"
        said = [line for line in scene.log("stranger").splitlines() if "cold" in line][0]
        say(f"a user that the service refuses ({refusal.response['Error']['Code']}): {said.split('store: ', 1)[-1][:300]}")
        scene.stop(process)
    else:
        say("this service lets everybody in: wrong passwords were not tried")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--baton", required=True)
    parser.add_argument("--place", required=True)
    parser.add_argument("--service", default="")
    scene = Scene(parser.parse_args())
    try:
        try:
            scene.client.create_bucket(Bucket=BUCKET)
        except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as why:
            raise SystemExit(f"s3: {scene.service} makes no bucket: {why}; is it there, and are AWS_ACCESS_KEY_ID and its like a user's of it?") from None
        process, client, url, names = values(scene)
        process, client, url = changes(scene, process, client, url, names)
        process, client, url = pages(scene, process, client, url)
        process, client, url = damage(scene, process, client, url, names)
        owners(scene, process, client, url, names)
        strangers(scene)
        left = scene.objects()
        scene.client.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": key} for key in list(left)[:1000]]})
    except BaseException:
        for log in sorted(scene.place.glob("*.log")):
            if log.name != "service.log":
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}", file=sys.stderr)
        print(f"--- service.log\n{scene.log('service')[-1500:] if not scene.options.service else ''}", file=sys.stderr)
        raise
    finally:
        scene.end()
    say("all is well")


main()
