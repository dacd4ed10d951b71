"""LMCache's own engine and clients with `baton store serve`: see scripts/lmcache.sh.

LMCache keeps one configuration a process, so each of its sides runs in a process of its own (`check.py client ...`).
There is no GPU: a tensor in ordinary memory stands for its KV cache, and LMCache's mock connector is the base of what
copies there. Everything below that is LMCache as it is installed: its hashing, keys, metadata, backends and clients.
"""

import argparse
import collections
import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time

CHUNK = 256
# Layers of a model with 8 KV heads of 128 in two bytes: 32 make 32 MiB a chunk, 80 make 80 MiB.
USUAL_LAYERS, LARGE_LAYERS = 32, 80
MODEL = "meta-llama/Llama-3.1-8B-Instruct"
# All that LMCache's clients say, seen at a proxy between.
SAID = {
    "redis": {"HELLO", "CLIENT MAINT_NOTIFICATIONS", "CLIENT SETINFO", "EXISTS", "GET", "SET"},
    "valkey": {"HELLO", "CLIENT SETINFO", "INFO", "EXISTS", "GET", "SET"},
    "resp": {"EXISTS", "GET", "SET"},
}
# A question of redis-py about a managed service; it goes on without.
UNKNOWN = "ERR unknown subcommand of CLIENT"


def say(what):
    print(f"lmcache: {what}", flush=True)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_for(what, check, seconds=30):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if check():
            return
        time.sleep(0.05)
    raise SystemExit(f"lmcache: {what}: not within {seconds} s")


class Wire:
    """One direction of a connection: passes bytes on at once, and reads the protocol behind."""

    def __init__(self, source, sink):
        self.source, self.sink, self.kept = source, sink, bytearray()

    def more(self):
        got = self.source.recv(1 << 18)
        if not got:
            raise EOFError
        self.sink.sendall(got)
        self.kept += got

    def line(self):
        while (end := self.kept.find(b"\r\n")) < 0:
            self.more()
        line = bytes(self.kept[:end])
        del self.kept[: end + 2]
        return line

    def bulk(self, size):
        """A text with its end of line; of a long one only that it was there."""
        left = size + 2
        if size > 1 << 16:
            while left > len(self.kept):
                left -= len(self.kept)
                self.kept.clear()
                self.more()
            del self.kept[:left]
            return b""
        while left > len(self.kept):
            self.more()
        text = bytes(self.kept[:size])
        del self.kept[:left]
        return text


class Proxy:
    """Stands between a client and the store, and counts commands and errors."""

    def __init__(self, store_port):
        self.store_port = store_port
        self.lock = threading.Lock()
        self.commands, self.errors = collections.Counter(), collections.Counter()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            client, _ = self.listener.accept()
            try:
                store = socket.create_connection(("127.0.0.1", self.store_port))
            except OSError:
                client.close()
                continue
            for end in (client, store):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self.follow, args=(self.command, client, store), daemon=True).start()
            threading.Thread(target=self.follow, args=(self.reply, store, client), daemon=True).start()

    def follow(self, step, source, sink):
        wire = Wire(source, sink)
        with contextlib.suppress(EOFError, OSError):
            while True:
                step(wire)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def command(self, wire):
        head = wire.line()
        assert head[:1] == b"*", head
        words = [wire.bulk(int(wire.line()[1:])) for _ in range(int(head[1:]))]
        name = words[0].decode().upper()
        if name == "CLIENT":
            name += " " + words[1].decode().upper()
        with self.lock:
            self.commands[name] += 1

    def reply(self, wire):
        head = wire.line()
        kind, rest = head[:1], head[1:]
        if kind == b"-":
            with self.lock:
                self.errors[rest.decode()] += 1
        elif kind in (b"$", b"="):
            if int(rest) >= 0:
                wire.bulk(int(rest))
        elif kind in (b"*", b"~", b">", b"%"):
            for _ in range(int(rest) * (2 if kind == b"%" else 1)):
                self.reply(wire)

    def take(self):
        """What was said since the last time, and the errors that came back."""
        with self.lock:
            taken = dict(self.commands), dict(self.errors)
            self.commands.clear()
            self.errors.clear()
        return taken


class Scene:
    """What runs, and the logs of it."""

    def __init__(self, options):
        self.options = options
        self.place = pathlib.Path(options.place)
        self.stores = {}

    def store(self, name, *arguments, port=None):
        port = port or free_port()
        log = open(self.place / f"{name}.log", "ab")
        command = [str(self.options.baton), "store", "serve", "--listen", f"127.0.0.1:{port}", *map(str, arguments)]
        self.stores[name] = process = subprocess.Popen(command, stdout=log, stderr=log)

        def answers():
            assert process.poll() is None, (self.place / f"{name}.log").read_text()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return True
            return False

        wait_for(f"the store {name}", answers)
        return port

    def end(self, name, how=signal.SIGTERM):
        process = self.stores.pop(name)
        process.send_signal(how)
        process.wait(30)

    def end_all(self):
        for process in self.stores.values():
            process.kill()
            process.wait()

    def begin(self, *arguments):
        environment = {
            **os.environ,
            # The hash that LMCache makes keys of has to be the same in every process.
            "PYTHONHASHSEED": "0",
            "PYTHONWARNINGS": "ignore",
            "LMCACHE_TRACK_USAGE": "false",
            "LMCACHE_LOG_LEVEL": "WARNING",
        }
        command = [sys.executable, __file__, "client", *map(str, arguments)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, text=True)

    def finish(self, process, seconds=240):
        """What a client has said, once it has ended well."""
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
            raise SystemExit(f"lmcache: {process.args[3:]} does not end:\n{said[-4000:]}") from None
        if process.returncode != 0:
            raise SystemExit(f"lmcache: {process.args[3:]}: {process.returncode}:\n{said[-6000:]}")
        return said

    def client(self, *arguments):
        return self.finish(self.begin(*arguments))


def told(said, name):
    return re.search(rf"^{name}=(\S+)$", said, re.MULTILINE).group(1)


def check_words(proxy, scheme, more=()):
    commands, errors = proxy.take()
    assert commands.keys() <= SAID[scheme] | set(more), f"{scheme} says {commands}"
    assert errors.keys() <= {UNKNOWN}, f"{scheme} is told {errors}"
    return ", ".join(f"{name} {count}" for name, count in sorted(commands.items()))


def engines_store_and_find(scene, proxy):
    for scheme in ("redis", "valkey"):
        url = f"{scheme}://127.0.0.1:{proxy.port}"
        scene.client("engine", url, "store", "first")
        scene.client("engine", url, "load", "first")
        say(f"LMCache's engine stores ten chunks of 32 MiB over {scheme}://, and one of another process finds the same bytes")
        say(f"   it said {check_words(proxy, scheme)}")
    # Both clients without metadata name values alike: what one stored is the other's.
    said = scene.client("engine", f"resp://127.0.0.1:{proxy.port}", "backend", "first", "stored")
    assert told(said, "found") == "10", said
    said = scene.client("engine", f"resp://127.0.0.1:{proxy.port}", "backend", "second")
    say(f"resp://, LMCache's native client, reads what valkey:// stored, and stores as much itself: {check_words(proxy, 'resp')}")
    scene.client("engine", f"valkey://127.0.0.1:{proxy.port}", "load", "second")
    check_words(proxy, "valkey")


def adapters_below_the_multiprocess_cache(scene, port):
    for kind in ("resp", "valkey"):
        # The adapter itself connects to the proxy, so that its commands are known.
        proxy = Proxy(port)
        spec = {"type": kind, "num_workers": 4}
        spec |= {"startup_nodes": f"127.0.0.1:{proxy.port}"} if kind == "valkey" else {"host": "127.0.0.1", "port": proxy.port}
        scene.client("levels", json.dumps(spec), "store", kind)
        scene.client("levels", json.dumps(spec), "load", kind)
        commands = check_words(proxy, kind, more={"DEL"})
        assert "DEL" in commands, commands
        say(f"the {kind} adapter below LMCache's multiprocess cache stores, prefetches and deletes: {commands}")


def many_at_once(scene, port):
    for scheme in ("redis", "valkey", "resp"):
        said = scene.client("engine", f"{scheme}://127.0.0.1:{port}", "threads", f"threads-{scheme}")
        say(f"eight threads put and get {told(said, 'values')} values over {scheme}://, each the right one")


def passwords(scene):
    logins = scene.place / "logins"
    logins.write_text("default secret team-a\nkv other team-b 1GiB\ntwin twin team-c\n")
    port = scene.store("closed", "--memory", "2GiB", "--auth", logins)
    at = f"127.0.0.1:{port}"
    extra = {
        "redis": ("default", "secret", f"redis://:secret@{at}"),
        # This release of LMCache hands the Valkey client the two in the wrong order; one that is both goes through.
        "valkey": ("twin", "twin", f"valkey://{at}"),
        "resp": ("kv", "other", f"resp://{at}"),
    }
    for scheme, (user, password, url) in extra.items():
        scene.client("engine", url, "backend", f"mine-{scheme}", "--user", user, "--password", password)
    say("passwords: redis:// in its address, resp:// and valkey:// in their settings")
    # What team-b has is not team-a's: its own key is not found there, though it is named alike.
    said = scene.client("engine", f"redis://kv:other@{at}", "backend", "mine-redis", "absent")
    assert told(said, "found") == "0", said
    # The native client only says so in its log and never answers; the other two are asked.
    said = scene.client("engine", f"redis://:wrong@{at}", "backend", "mine-redis", "absent")
    assert told(said, "found") == "0" and "WRONGPASS" in said.upper() or "invalid username" in said, said
    said = scene.client("engine", f"redis://{at}", "backend", "mine-redis", "absent")
    assert told(said, "found") == "0" and "authenticated" in said, said
    say("a wrong password or none finds nothing, and LMCache's log says why")
    scene.end("closed")


def large_chunks(scene):
    port = scene.store("low", "--memory", "1GiB", "--value-max", "64MiB")
    said = scene.client("engine", f"redis://127.0.0.1:{port}", "refused", "large", "--layers", LARGE_LAYERS)
    say(f"a chunk of 80 MiB above --value-max is refused; LMCache logs: {told(said, 'refusal').replace('_', ' ')}")
    scene.end("low")
    port = scene.store("large", "--memory", "2GiB")
    for scheme in ("redis", "valkey"):
        url = f"{scheme}://127.0.0.1:{port}"
        scene.client("engine", url, "store", scheme, "--layers", LARGE_LAYERS, "--chunks", 4)
        scene.client("engine", url, "load", scheme, "--layers", LARGE_LAYERS, "--chunks", 4)
    say("by default such chunks are stored and found")
    scene.end("large")


def too_little_memory(scene):
    port = scene.store("small", "--memory", "512MiB")
    for scheme in ("redis", "valkey", "resp"):
        proxy = Proxy(port)
        said = scene.client("engine", f"{scheme}://127.0.0.1:{proxy.port}", "pressure", f"pressure-{scheme}")
        commands, errors = proxy.take()
        assert errors.keys() <= {UNKNOWN}, errors
        say(
            f"{told(said, 'put')} chunks of 32 MiB into 512 MiB over {scheme}://: no put is refused,"
            f" {told(said, 'found')} are left, none has other bytes ({commands.get('DEL', 0)} DEL)"
        )
    scene.end("small")


def restarts(scene):
    arguments = ("--memory", "1GiB", "--ssd", scene.place / "ssd", "--ssd-size", "2GiB", "--ssd-admit", "first")
    (scene.place / "ssd").mkdir()
    port = scene.store("lasting", *arguments)
    url = f"redis://127.0.0.1:{port}"
    scene.client("engine", url, "store", "lasting")
    scene.end("lasting")
    scene.store("lasting", *arguments, port=port)
    scene.client("engine", url, "load", "lasting")
    say("with --ssd chunks outlive a restart of the store")
    # One engine that lives through it; it is told of each step over its input.
    for scheme in ("redis", "valkey"):
        scene.end("lasting")
        scene.store("lasting", "--memory", "1GiB", port=port)
        process = subprocess.Popen(
            [sys.executable, __file__, "client", "engine", f"{scheme}://127.0.0.1:{port}", "through", scheme],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "CRITICAL"},
        )

        def reach(word):
            heard = []
            for line in process.stdout:
                heard.append(line)
                if line.strip() == word:
                    return
            raise SystemExit(f"lmcache: {scheme} through a restart, before {word}:\n{''.join(heard)[-4000:]}")

        def go_on():
            process.stdin.write("\n")
            process.stdin.flush()

        reach("stored")
        scene.end("lasting", signal.SIGKILL)
        go_on()
        reach("alone")
        scene.store("lasting", "--memory", "1GiB", port=port)
        go_on()
        reach("again")
        scene.finish(process)
        say(f"an engine over {scheme}:// finds nothing while the store is gone, and stores and finds again once it is back")


def slow_writers(scene, port):
    """A client that stands still in the middle of a value may go on; two engines that store the same prompt leave it whole."""
    size = 8 << 20
    value = bytes(size)
    first, others = (socket.create_connection(("127.0.0.1", port), 30) for _ in range(2))
    first.sendall(b"*3\r\n$3\r\nSET\r\n$4\r\nslow\r\n$%d\r\n" % size + value[: size // 2])
    end, puts = time.monotonic() + 5, 0
    while time.monotonic() < end:
        others.sendall(b"*3\r\n$3\r\nSET\r\n$8\r\n%08d\r\n$1\r\nx\r\n" % puts)
        assert others.recv(99) == b"+OK\r\n"
        puts += 1
    first.sendall(value[size // 2 :] + b"\r\n")
    answer = first.recv(200)
    assert answer == b"+OK\r\n", f"a writer that stood still for 5 s beside {puts} other puts is told {answer}"
    url, few = f"redis://127.0.0.1:{port}", ("--chunks", 4)
    same = [scene.begin("engine", url, "store_again", "shared", *few) for _ in range(2)]
    refused = sum("TRYAGAIN" in said for said in map(scene.finish, same))
    assert refused == 0, "two engines that store the same chunks hindered each other"
    scene.client("engine", url, "load", "shared", *few)
    say("a writer may stand still for 5 s; what two engines store at once is found whole, and neither hinders the other")


def ranks(scene, port):
    """What two ranks store is one object: neither finds its own before the other's is there, nor after it went."""
    few, url = ("--chunks", 4, "--world", 2), f"redis://127.0.0.1:{port}"
    scene.client("engine", url, "store_unseen", "ranks", *few, "--rank", 0)
    scene.client("engine", url, "store", "ranks", *few, "--rank", 1)
    for rank in (0, 1):
        scene.client("engine", url, "load", "ranks", *few, "--rank", rank)
    client, keys, cursor = socket.create_connection(("127.0.0.1", port), 30), [], b"0"
    while cursor != b"0" or not keys:
        client.sendall(b"SCAN %s COUNT 1000\r\n" % cursor)
        listed = b""
        while (lines := listed.split(b"\r\n"))[4:] == [] or len(lines) < 5 + 2 * int(lines[3][1:]):
            listed += client.recv(1 << 16)
        cursor, keys = lines[2], keys + lines[5::2]
    first = [key for key in keys if b"@2@1@" in key]
    # Four whole chunks and the rest, of two ranks, each with what its client keeps beside it.
    assert len(keys) == 2 * len(first) == 20, keys
    for key in first:
        client.sendall(b"DEL " + key + b"\r\n")
        assert client.recv(99) == b":1\r\n"
    scene.client("engine", url, "absent", "ranks", *few, "--rank", 0)
    say(f"two ranks: {len(keys)} keys are found when both have stored, and none of rank 0 once those of rank 1 are gone")


def lmcaches_own_checks(scene, port):
    config = scene.place / "lmcache.yaml"
    config.write_text(f"chunk_size: 256\nlocal_cpu: false\nmax_local_cpu_size: 1.0\nremote_url: redis://127.0.0.1:{port}\nremote_serde: naive\n")
    adapter = json.dumps({"type": "resp", "host": "127.0.0.1", "port": port, "num_workers": 4})
    runs = {
        "test_remote": [],
        "test_storage_manager": [],
        "test_l2_adapter": ["--obj-size", "4194304", "--l2-adapter", adapter],
    }
    for mode, more in runs.items():
        environment = {**os.environ, "LMCACHE_CONFIG_FILE": str(config), "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR"}
        command = [sys.executable, "-u", "-m", "lmcache.v1.basic_check", "--mode", mode, "--num-keys", "8", *more]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        # Its threads do not always end by themselves: it is over with the last row of its table.
        watch = threading.Timer(120, process.kill)
        watch.start()
        heard, rates = [], []
        for line in process.stdout:
            heard.append(line)
            rates += re.findall(r"\|\s+(\d+)/(\d+) \|\s+([\d.]+)% \|", line)
            if len(rates) == 4:
                break
        watch.cancel()
        process.kill()
        process.wait()
        good = len(rates) == 4 and all(passed == of and rate == "100.0" for passed, of, rate in rates)
        assert good, f"{mode}:\n{''.join(heard)[-4000:]}"
    say("LMCache's own check of a remote passes: test_remote, test_storage_manager, test_l2_adapter")


def check(options):
    scene = Scene(options)
    try:
        port = scene.store("open", "--memory", "6GiB")
        engines_store_and_find(scene, Proxy(port))
        adapters_below_the_multiprocess_cache(scene, port)
        many_at_once(scene, port)
        lmcaches_own_checks(scene, port)
        scene.end("open")
        passwords(scene)
        large_chunks(scene)
        too_little_memory(scene)
        restarts(scene)
        slow_writers(scene, scene.store("shared", "--memory", "2GiB"))
        ranks(scene, scene.store("parts", "--memory", "2GiB", "--parts", "world"))
    except BaseException:
        for log in sorted(scene.place.glob("*.log")):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}", file=sys.stderr)
        raise
    finally:
        scene.end_all()
    say("all is well")


def kv_of(name, layers, tokens):
    """What a model would have made of these tokens: bytes that differ by name."""
    import torch

    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randint(-(1 << 15), 1 << 15, (2, layers, tokens, 8 * 128), dtype=torch.int16, generator=generator)


class Engine:
    """LMCache's engine, with memory in the GPU's place."""

    def __init__(self, options):
        import torch
        from lmcache.utils import mock_up_broadcast_fn, mock_up_broadcast_object_fn
        from lmcache.v1.cache_engine import LMCacheEngineBuilder
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector
        from lmcache.v1.metadata import LMCacheMetadata

        class Memory(MockGPUConnector):
            kv = None

            def batched_from_gpu(self, memory_objs, starts, ends, **_):
                for chunk, start, end in zip(memory_objs, starts, ends):
                    chunk.tensor.copy_(self.kv[:, :, start:end])

            def batched_to_gpu(self, memory_objs, starts, ends, **_):
                for chunk, start, end in zip(memory_objs, starts, ends):
                    self.kv[:, :, start:end].copy_(chunk.tensor)

        self.torch, self.options = torch, options
        self.metered = options.url.startswith("redis")
        extra = {"save_chunk_meta": self.metered}
        if not self.metered:
            prefix = "valkey_" if options.url.startswith("valkey") else ""
            extra |= {f"{prefix}username": options.user, f"{prefix}password": options.password}
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK,
            local_cpu=False,
            max_local_cpu_size=2.0,
            remote_url=options.url,
            remote_serde="naive",
            save_unfull_chunk=self.metered,
            extra_config=extra,
        )
        shape = (options.layers, 2, CHUNK, 8, 128)
        metadata = LMCacheMetadata(
            model_name=MODEL,
            world_size=options.world,
            local_world_size=options.world,
            worker_id=options.rank,
            local_worker_id=options.rank,
            kv_dtype=torch.bfloat16,
            kv_shape=shape,
            chunk_size=CHUNK,
        )
        self.memory = Memory(shape)
        self.engine = LMCacheEngineBuilder.get_or_create(
            "check", config, metadata, self.memory, mock_up_broadcast_fn, mock_up_broadcast_object_fn
        )
        self.engine.post_init()
        self.remote = self.engine.storage_manager.storage_backends["RemoteBackend"]
        assert self.remote.connection is not None, "no connector was made"
        # Only the client with metadata keeps a chunk that is not full.
        count = options.chunks * CHUNK + (100 if self.metered else 0)
        self.tokens = self.tokens_of(options.name, count)
        self.kv = kv_of(options.name, options.layers, count)

    def tokens_of(self, name, count):
        return self.torch.arange(count) + 1000 * sum(name.encode())

    def keys(self, tokens=None):
        return [key for _, _, key in self.engine.token_database.process_tokens(self.tokens if tokens is None else tokens)]

    def on_loop(self, coroutine):
        import asyncio

        return asyncio.run_coroutine_threadsafe(coroutine, self.remote.loop).result(60)

    def found(self):
        """Chunks from the start on, as the asynchronous lookup asks."""
        return self.on_loop(self.remote.batched_async_contains("check", self.keys()))

    def store(self):
        self.memory.kv = self.kv.clone().view(self.torch.bfloat16)
        self.engine.store(self.tokens)
        chunks = len(self.keys())
        wait_for("every chunk is stored", lambda: self.found() == chunks, 60)

    def store_unseen(self):
        """As one rank of several, before the others."""
        self.memory.kv = self.kv.clone().view(self.torch.bfloat16)
        self.engine.store(self.tokens)
        time.sleep(8)
        self.absent()

    def absent(self):
        assert self.found() == 0 and self.engine.lookup(self.tokens) == 0, "found, though of use to nobody"

    def store_again(self):
        """As for each new request with these tokens: puts on connections of before the restart are lost, with any server."""

        def stored():
            self.engine.store(self.tokens)
            time.sleep(2)
            return self.found() == len(self.keys())

        self.memory.kv = self.kv.clone().view(self.torch.bfloat16)
        wait_for("every chunk is stored", stored, 60)

    def allocate(self, start=0):
        from lmcache.v1.memory_management import MemoryFormat

        chunk = self.engine.storage_manager.allocate(
            self.torch.Size((2, self.options.layers, CHUNK, 8 * 128)), self.torch.bfloat16, fmt=MemoryFormat.KV_2LTD
        )
        chunk.tensor.copy_(self.kv[:, :, start : start + CHUNK].view(self.torch.bfloat16))
        return chunk

    def same(self, a, b):
        return self.torch.equal(a.view(self.torch.int16), b.view(self.torch.int16))

    def load(self):
        """All of it by the engine: lookup and retrieve."""
        count, chunks = len(self.tokens), self.options.chunks
        assert self.engine.lookup(self.tokens) == count, "not all is found"
        self.memory.kv = self.torch.zeros_like(self.kv).view(self.torch.bfloat16)
        assert int(self.engine.retrieve(self.tokens).sum()) == count, "not all is retrieved"
        assert self.same(self.memory.kv, self.kv), "other bytes came back"
        # Half of the prompt and then something else: half of the chunks.
        half = self.tokens.clone()
        half[CHUNK * (chunks // 2) :] += 1
        assert self.engine.lookup(half) == CHUNK * (chunks // 2), "a prefix is not found"
        assert self.engine.lookup(self.tokens_of(self.options.name + "else", count)) == 0, "what was never stored is found"

    def backend(self, want):
        """What the connector's own forms do, one and many, with keys that are there and that are not."""
        keys = [key for start, end, key in self.engine.token_database.process_tokens(self.tokens) if end - start == CHUNK]
        if want == "absent":
            print(f"found={self.found()}")
            assert not self.remote.contains(keys[0])
            return
        if want != "stored":
            assert self.found() == 0 and not self.remote.contains(keys[0])
            chunks = [self.allocate(CHUNK * i) for i in range(len(keys))]
            self.remote.submit_put_task(keys[0], chunks[0]).result(30)
            self.engine.storage_manager.batched_put(keys, chunks)
            wait_for("every chunk is there", lambda: self.on_loop(self.remote.batched_async_contains("check", keys)) == len(keys), 60)
        print(f"found={self.on_loop(self.remote.batched_async_contains('check', keys))}")
        one = self.remote.get_blocking(keys[-1])
        assert self.same(one.tensor, self.kv[:, :, CHUNK * (len(keys) - 1) : CHUNK * len(keys)]), "other bytes"
        one.ref_count_down()
        for several in (
            self.remote.batched_get_blocking(keys),
            self.on_loop(self.remote.batched_get_non_blocking("check", keys)),
        ):
            assert len(several) == len(keys)
            for i, chunk in enumerate(several):
                assert self.same(chunk.tensor, self.kv[:, :, CHUNK * i : CHUNK * (i + 1)]), f"chunk {i} has other bytes"
                chunk.ref_count_down()
        if not self.options.url.startswith("resp"):
            # The native client of this release waits for ever for a key that is not there, whatever server it asks.
            assert self.remote.get_blocking(self.keys(self.tokens + 1)[0]) is None
        self.healthy()

    def healthy(self):
        from lmcache.v1.health_monitor.checks.remote_backend_check import RemoteBackendHealthCheck

        health = RemoteBackendHealthCheck(self.remote)
        health._last_get_blocking_failed_count = self.remote.get_blocking_failed_count
        assert health.check(), "LMCache's health check fails"
        assert health._put_and_get_check(), "LMCache's put and get check fails"

    def threads(self):
        """Eight threads, each with keys of its own and one that all have."""
        from lmcache.utils import CacheEngineKey

        rounds, threads, failed = 6, 8, []
        key = lambda n: CacheEngineKey(MODEL, 1, 0, n, self.torch.bfloat16)

        def work(thread):
            try:
                for i in range(rounds):
                    number = 1 + thread * rounds + i
                    start = number * 7
                    for n, first in ((number, start), (0, 0)):
                        chunk = self.allocate(first)
                        self.on_loop(self.remote.connection.put(key(n), chunk))
                        back = self.on_loop(self.remote.connection.get(key(n)))
                        assert self.same(back.tensor, self.kv[:, :, first : first + CHUNK]), f"value {n} has other bytes"
                        back.ref_count_down()
            except BaseException as error:  # noqa: BLE001 - the main thread tells
                failed.append(f"{type(error).__name__}: {error}")

        running = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(120)
        assert not failed and not any(thread.is_alive() for thread in running), failed or "a thread does not end"
        print(f"values={rounds * threads + 1}")

    def refused(self):
        """A put above the store's limit fails, is told, and breaks nothing else."""
        key = self.keys()[0]
        try:
            self.on_loop(self.remote.connection.put(key, self.allocate()))
        except Exception as error:  # noqa: BLE001 - the client's error is what is looked for
            print("refusal=" + str(error).replace(" ", "_"))
        else:
            raise AssertionError("it was taken")
        assert not self.remote.contains(key) and self.remote.get_blocking(key) is None

    def pressure(self):
        """More than the store can hold: puts succeed, and what is left is right."""
        from lmcache.utils import CacheEngineKey

        batch, rounds, found = 8, 6, 0
        numbers = range(batch * rounds)
        key = lambda n: CacheEngineKey(MODEL, 1, 0, 1 + n + 1000 * sum(self.options.name.encode()), self.torch.bfloat16)
        for round_ in range(rounds):
            several = range(round_ * batch, (round_ + 1) * batch)
            chunks = [self.allocate(n * 13) for n in several]
            # The instrumented connector hides a failed batch; the one below tells.
            self.on_loop(self.remote.connection.getWrappedConnector().batched_put([key(n) for n in several], chunks))
            for chunk in chunks:
                chunk.ref_count_down()
        for n in numbers:
            if not self.remote.contains(key(n)):
                continue
            chunk = self.remote.get_blocking(key(n))
            if chunk is None:
                continue
            found += 1
            assert self.same(chunk.tensor, self.kv[:, :, n * 13 : n * 13 + CHUNK]), f"chunk {n} has other bytes"
            chunk.ref_count_down()
        assert 0 < found < len(numbers), found
        print(f"put={len(numbers)}\nfound={found}")

    def through(self):
        """Lives through a restart of the store."""
        self.store()
        print("stored", flush=True)
        sys.stdin.readline()
        assert self.engine.lookup(self.tokens) == 0, "found in a store that is gone"
        assert int(self.engine.retrieve(self.tokens).sum()) == 0
        print("alone", flush=True)
        sys.stdin.readline()
        self.store_again()
        self.load()
        print("again", flush=True)


def levels(spec, what, name):
    """LMCache's multiprocess cache: memory, and an adapter to the store below it."""
    import torch
    from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
    from lmcache.v1.distributed.config import parse_args
    from lmcache.v1.distributed.storage_manager import StorageManager

    arguments = ["--l1-size-gb", "1", "--no-l1-use-lazy", "--eviction-policy", "LRU", "--l2-adapter", spec]
    manager = StorageManager(parse_args(arguments))
    kv = kv_of(name, USUAL_LAYERS, 8 * CHUNK)
    shape = torch.Size((2, USUAL_LAYERS, CHUNK, 8 * 128))
    layout = MemoryLayoutDesc([shape], [torch.bfloat16])
    rank = ObjectKey.ComputeKVRank(1, 0, 1, 0)
    keys = [ObjectKey(chunk_hash=name.encode() + i.to_bytes(32, "big"), model_name=MODEL, kv_rank=rank) for i in range(8)]
    part = lambda i: kv[:, :, i * CHUNK : (i + 1) * CHUNK]
    (_, adapter), = manager.l2_adapters()

    def there():
        import select

        task = adapter.submit_lookup_and_lock_task(keys, {})
        poll = select.poll()
        poll.register(adapter.get_lookup_and_lock_event_fd(), select.POLLIN)
        while (bits := adapter.query_lookup_and_lock_result(task)) is None:
            poll.poll(50)
        adapter.submit_unlock(keys)
        return sum(bits.test(i) for i in range(len(keys)))

    if what == "store":
        reserved = manager.reserve_write(keys, layout)
        assert len(reserved) == len(keys)
        for i, key in enumerate(keys):
            reserved[key].tensor.copy_(part(i).view(torch.bfloat16))
        manager.finish_write(keys)
        wait_for("every chunk is below", lambda: there() == len(keys), 60)
    else:
        spec = PrefetchTaskSpec([GroupedObjectKeys(keys=keys, object_group_id=0, layout_desc=layout)])
        handle = manager.submit_prefetch_task(spec)
        assert manager.wait_prefetch_status(handle, 60), "the prefetch does not end"
        result = manager.query_prefetch_status(handle)
        assert sum(bits.popcount() for bits in result.l2_hit_cells) == len(keys), "not all came from below"
        with manager.read_prefetched_results(keys) as chunks:
            assert chunks is not None
            for i, chunk in enumerate(chunks):
                assert torch.equal(chunk.tensor.view(torch.int16), part(i)), f"chunk {i} has other bytes"
        manager.finish_read_prefetched(keys)
        adapter.delete(keys)
        assert there() == 0, "what was deleted is found"


def client(arguments):
    if arguments[0] == "levels":
        levels(*arguments[1:])
    else:
        parser = argparse.ArgumentParser()
        parser.add_argument("url")
        parser.add_argument("what")
        parser.add_argument("name")
        parser.add_argument("want", nargs="?", default="")
        parser.add_argument("--layers", type=int, default=USUAL_LAYERS)
        parser.add_argument("--chunks", type=int, default=10)
        parser.add_argument("--world", type=int, default=1)
        parser.add_argument("--rank", type=int, default=0)
        parser.add_argument("--user", default="")
        parser.add_argument("--password", default="")
        options = parser.parse_args(arguments[1:])
        engine = Engine(options)
        does = getattr(engine, options.what)
        does(options.want) if options.what == "backend" else does()
    sys.stdout.flush()


def main():
    if sys.argv[1:2] == ["client"]:
        try:
            client(sys.argv[2:])
        except BaseException:
            import traceback

            traceback.print_exc()
            sys.stdout.flush()
            os._exit(1)
        # LMCache's threads do not end by themselves.
        os._exit(0)
    parser = argparse.ArgumentParser()
    for name in ("baton", "place"):
        parser.add_argument(f"--{name}", required=True, type=pathlib.Path)
    check(parser.parse_args())


main()
