"""Baton and Mooncake, each with the other's half: see scripts/mooncake.sh.

The real client and the real engines run in processes of their own (`check.py client ...`), for the library keeps
threads that do not end, and a crash of one must not end the check.
"""

import argparse
import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

# A byte, a page, and more than one piece of any sort.
SIZES = {"byte": 1, "page": 4096, "nine": 9 << 20}
# A master forgets who is silent for 10 s; some more for a busy machine.
FORGETS_S = 40


def content(name, size):
    """Bytes that differ by name, and at every distance that anything is cut at."""
    seed = sum(name.encode()) | 1
    return bytes((i * seed + (i >> 8) + (i >> 16)) & 255 for i in range(4096)) * (size // 4096 + 1)


def value(name):
    size = SIZES[name.split("-")[-1]]
    pattern = content(name, size)
    return b"".join(i.to_bytes(4, "little") + pattern[4:4096] for i in range(size // 4096 + 1))[:size]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_for(what, check, seconds=20):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if check():
            return
        time.sleep(0.2)
    raise SystemExit(f"mooncake: {what}: not within {seconds} s")


def listens(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


class Scene:
    """What runs, and the logs of it."""

    def __init__(self, options):
        self.options = options
        self.place = pathlib.Path(options.place)
        self.running = {}

    def start(self, name, *command):
        log = open(self.place / f"{name}.log", "ab")
        self.running[name] = subprocess.Popen([str(c) for c in command], stdout=log, stderr=log)

    def log(self, name):
        return (self.place / f"{name}.log").read_text(errors="replace")

    def end(self, name, how=signal.SIGTERM):
        process = self.running.pop(name)
        process.send_signal(how)
        try:
            return process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            raise SystemExit(f"mooncake: {name} does not end:\n{self.log(name)}") from None

    def end_all(self):
        for process in self.running.values():
            process.kill()
            process.wait()

    def master(self, name="master"):
        port = free_port()
        self.start(name, self.options.bin / "mooncake_master", f"--rpc_port={port}", f"--metrics_port={free_port()}")
        wait_for("the master", lambda: listens(port))
        return f"127.0.0.1:{port}"

    def node(self, name, master, port=0):
        listen = f"127.0.0.1:{port}" if port else "127.0.0.1"
        mounted = self.mounts(name)
        self.start(name, self.options.baton, "mooncake", "node", "--master", master, "--listen", listen, "--segment-bytes", 256 << 20)
        wait_for(f"{name} mounts", lambda: self.mounts(name) > mounted)

    def mounts(self, name):
        path = self.place / f"{name}.log"
        return path.read_text().count("is mounted in") if path.exists() else 0

    def baton(self, *arguments, stdin=None, good=(0,)):
        command = [self.options.baton, "mooncake", *[str(a) for a in arguments]]
        done = subprocess.run(command, input=stdin, capture_output=True, timeout=120, check=False)
        if done.returncode not in good:
            raise SystemExit(f"mooncake: {command}: {done.returncode}: {done.stderr.decode()}")
        return done

    def real(self, *arguments, environment=None):
        """Runs this file as a real client."""
        environment = {**os.environ, **(environment or {})}
        command = [sys.executable, __file__, *arguments]
        done = subprocess.run(command, capture_output=True, timeout=180, check=False, env=environment)
        if done.returncode != 0:
            raise SystemExit(f"mooncake: real {arguments}: {done.returncode}:\n{done.stdout.decode()}\n{done.stderr.decode()[-4000:]}")


def say(what):
    print(f"mooncake: {what}", flush=True)


def real_client_and_baton_node(scene):
    master = scene.master()
    scene.node("node", master)
    scene.real("client", master, "put", *[f"real-{size}" for size in SIZES])
    scene.real("client", master, "get", *[f"real-{size}" for size in SIZES])
    say("a real client puts into Baton's node, and another one gets the same bytes")
    for size in SIZES:
        got = scene.baton("get", "--master", master, f"real-{size}").stdout
        assert got == value(f"real-{size}"), f"real-{size}: Baton's client reads other bytes"
        scene.baton("put", "--master", master, f"baton-{size}", stdin=value(f"baton-{size}"))
    scene.real("client", master, "get", *[f"baton-{size}" for size in SIZES])
    say("Baton's client reads what a real client put, and the reverse")
    assert scene.baton("exists", "--master", master, "real-page").returncode == 0
    assert scene.baton("exists", "--master", master, "absent", good=(1,)).returncode == 1
    again = scene.baton("put", "--master", master, "real-page", stdin=b"other", good=(1,))
    assert b"there is such an object" in again.stderr, again.stderr
    absent = scene.baton("get", "--master", master, "absent", good=(1,))
    assert b"there is no such object" in absent.stderr, absent.stderr
    nobody = scene.baton("exists", "--master", f"127.0.0.1:{free_port()}", "real-page", good=(2,))
    assert b"is the master running" in nobody.stderr, nobody.stderr
    say("what is absent, what is there already, and that nobody answers, is told")
    many = [f"many{i}-{size}" for i in range(4) for size in SIZES]
    scene.real("client", master, "put-batch", *many)
    scene.real("client", master, "get-batch", *many)
    say(f"batches of {len(many)} values, too")
    first_version = {"MC_TCP_PROTO": "1"}
    scene.real("client", master, "put", *[f"one-{size}" for size in SIZES], environment=first_version)
    scene.real("client", master, "get", *[f"one-{size}" for size in SIZES], environment=first_version)
    for size in SIZES:
        assert scene.baton("get", "--master", master, f"one-{size}").stdout == value(f"one-{size}"), size
    say("a real client that is forced to the first version of the data protocol loses nothing")
    return master


def a_node_is_killed_and_comes_back(scene, master):
    port = int(scene.log("node").split("segment 127.0.0.1:")[1].split()[0])
    scene.end("node", signal.SIGKILL)
    broken = scene.baton("get", "--master", master, "baton-nine", good=(1,))
    assert b"mooncake: " in broken.stderr, broken.stderr
    for _ in range(2):
        # The second put would be refused for the first one's sake, had that not been revoked.
        failed = scene.baton("put", "--master", master, "again-page", stdin=value("again-page"), good=(1,))
        assert b"handshake" in failed.stderr and b"taken" not in failed.stderr, failed.stderr
    say(f"a killed node is told: {broken.stderr.decode().strip()}")
    # At once, at the same address, before the master has noticed: what it still says of the old life must not be read.
    began = time.monotonic()
    while True:
        scene.start("node", scene.options.baton, "mooncake", "node", "--master", master, "--listen", f"127.0.0.1:{port}", "--segment-bytes", 256 << 20)
        mounted = scene.mounts("node")
        wait_for("the node comes back or is refused", lambda: scene.mounts("node") > mounted or scene.running["node"].poll() is not None)
        if scene.running["node"].poll() is None:
            break
        scene.running.pop("node")
        assert time.monotonic() - began < FORGETS_S, scene.log("node")
        time.sleep(1)
    stale = scene.baton("get", "--master", master, "baton-page", good=(0, 1))
    assert stale.returncode == 1, "bytes of an earlier life were read"
    say(f"after a restart the old life's objects are refused: {stale.stderr.decode().strip()}")
    gone = lambda: scene.baton("exists", "--master", master, "baton-page", good=(0, 1)).returncode == 1
    wait_for("the master forgets the old life", gone, FORGETS_S)
    scene.baton("put", "--master", master, "second-page", stdin=value("second-page"))
    scene.real("client", master, "get", "second-page")
    say("and the new life serves")


def the_master_is_replaced(scene, master):
    again = lambda: scene.log("node").count("is mounted again")
    before = again()
    scene.end("master", signal.SIGKILL)
    port = master.split(":")[1]
    scene.start("master", scene.options.bin / "mooncake_master", f"--rpc_port={port}", f"--metrics_port={free_port()}")
    wait_for("the master", lambda: listens(int(port)))
    wait_for("the node is mounted again", lambda: again() > before, FORGETS_S)
    scene.baton("put", "--master", master, "third-page", stdin=value("third-page"))
    scene.real("client", master, "get", "third-page")
    say("a master that is started anew has the segment again")
    assert scene.end("node", signal.SIGTERM) == 0, scene.log("node")
    full = scene.baton("put", "--master", master, "fourth-page", stdin=value("fourth-page"), good=(1,))
    assert b"the master says" in full.stderr, full.stderr
    say("a node that is stopped takes its segment back at once")


def two_copies(scene):
    master = scene.master("copies")
    scene.node("left", master)
    scene.node("right", master)
    for size in SIZES:
        scene.baton("put", "--master", master, "--replicas", 2, f"twice-{size}", stdin=value(f"twice-{size}"))
    scene.end("right", signal.SIGKILL)
    for size in SIZES:
        assert scene.baton("get", "--master", master, f"twice-{size}").stdout == value(f"twice-{size}"), size
    say("of two copies one is enough")
    scene.end("left")
    scene.end("copies")


def a_real_node_and_batons_client(scene, master):
    scene.start("realnode", sys.executable, __file__, "client", master, "lend")
    wait_for("the real node lends", lambda: "lends" in scene.log("realnode"), 60)
    for size in SIZES:
        scene.baton("put", "--master", master, f"over-{size}", stdin=value(f"over-{size}"))
        got = scene.baton("get", "--master", master, f"over-{size}").stdout
        assert got == value(f"over-{size}"), f"over-{size}: other bytes came back"
    scene.real("client", master, "get", *[f"over-{size}" for size in SIZES])
    scene.baton("remove", "--master", master, "--force", "over-page")
    assert scene.baton("exists", "--master", master, "over-page", good=(1,)).returncode == 1
    say("Baton's client puts, gets and removes in a real node's memory")
    scene.end("realnode", signal.SIGKILL)


def two_engines_over_batons_metadata(scene):
    port = free_port()
    scene.start("metadata", scene.options.baton, "mooncake", "metadata", "--listen", f"127.0.0.1:{port}")
    wait_for("the metadata server", lambda: listens(port))
    url = f"http://127.0.0.1:{port}/metadata"
    scene.start("engine", sys.executable, __file__, "engine", url)
    wait_for("the first engine", lambda: "target" in scene.log("engine"), 60)
    _, name, address = [line for line in scene.log("engine").splitlines() if line.startswith("target")][0].split()
    scene.real("engine", url, name, address)
    wait_for("the bytes", lambda: "arrived" in scene.log("engine"), 30)
    say("two real engines find each other over Baton's metadata server, and move bytes")
    a_segment_that_is_named_there(scene, url)
    try:
        urllib.request.urlopen(urllib.request.Request(f"{url}?key=mooncake/rpc_meta/{name}", b"{}", method="PUT"))
        raise SystemExit("mooncake: an engine's address was taken over")
    except urllib.error.HTTPError as refused:
        assert refused.code == 400, refused
    scene.end("engine", signal.SIGKILL)
    scene.end("metadata")


def a_segment_that_is_named_there(scene, url):
    master = scene.master("second")
    scene.start("named", sys.executable, __file__, "client", master, "lend", url)
    wait_for("the real node lends", lambda: "lends" in scene.log("named"), 60)
    at = ("--master", master, "--metadata", url)
    for size in SIZES:
        scene.baton("put", *at, f"named-{size}", stdin=value(f"named-{size}"))
        assert scene.baton("get", *at, f"named-{size}").stdout == value(f"named-{size}"), size
    say("Baton's client finds a real node's segment in the metadata server")
    scene.end("named", signal.SIGKILL)


def check(options):
    scene = Scene(options)
    try:
        master = real_client_and_baton_node(scene)
        a_node_is_killed_and_comes_back(scene, master)
        the_master_is_replaced(scene, master)
        two_copies(scene)
        a_real_node_and_batons_client(scene, master)
        two_engines_over_batons_metadata(scene)
    except BaseException:
        for name in ("node", "master"):
            if (scene.place / f"{name}.log").exists():
                print(f"--- {name}\n{scene.log(name)[-3000:]}", file=sys.stderr)
        raise
    finally:
        scene.end_all()
    say("all is well")


def real_client(master, what, names):
    """Does `what` with `names`: put, get, put-batch, get-batch, or lend (until it is ended; at the metadata server names[0])."""
    # Real clients then write checksums, and look at those that are there: at Baton's, too.
    os.environ["MOONCAKE_STORE_CHECKSUM"] = "1"
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    lends = 256 << 20 if what == "lend" else 0
    host = f"127.0.0.1:{free_port()}"
    metadata = names[0] if what == "lend" and names else "P2PHANDSHAKE"
    code = store.setup(host, metadata, lends, 64 << 20, "tcp", "", master)
    assert code == 0, f"setup: {code}"
    if what == "lend":
        print("lends", flush=True)
        time.sleep(600)
    if what == "put-batch":
        code = store.put_batch(names, [value(name) for name in names])
        assert code == 0, f"put_batch: {code}"
        return
    if what == "get-batch":
        for name, got in zip(names, store.get_batch(names)):
            assert got == value(name), f"get_batch {name}: other bytes"
        return
    for name in names:
        if what == "put":
            code = store.put(name, value(name))
            assert code == 0, f"put {name}: {code}"
        else:
            assert store.get(name) == value(name), f"get {name}: other bytes"


def real_engine(url, target):
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    # Engines of one machine need names that differ.
    name = f"127.0.0.1:{free_port()}"
    code = engine.initialize(name, url, "tcp", "")
    assert code == 0, f"initialize: {code}"
    size = 1 << 20
    buffer = engine.allocate_managed_buffer(size)
    assert buffer, "no buffer"
    if not target:
        engine.write_bytes_to_buffer(buffer, b"\0" * 16, 16)
        print("target", name, buffer, flush=True)
        while engine.read_bytes_from_buffer(buffer, 16) != b"sixteen bytes...":
            time.sleep(0.1)
        print("arrived", flush=True)
        time.sleep(600)
    engine.write_bytes_to_buffer(buffer, b"sixteen bytes...", 16)
    code = engine.transfer_sync_write(target[0], buffer, int(target[1]), 16)
    assert code == 0, f"write: {code}"


def main():
    if sys.argv[1:2] == ["client"]:
        real_client(sys.argv[2], sys.argv[3], sys.argv[4:])
    elif sys.argv[1:2] == ["engine"]:
        real_engine(sys.argv[2], sys.argv[3:])
    else:
        parser = argparse.ArgumentParser()
        for name in ("baton", "bin", "place"):
            parser.add_argument(f"--{name}", required=True, type=pathlib.Path)
        check(parser.parse_args())
        return
    sys.stdout.flush()
    # The library's threads do not end by themselves.
    os._exit(0)


main()
