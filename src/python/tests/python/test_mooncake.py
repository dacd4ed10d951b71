# SPDX-License-Identifier: Apache-2.0
"""The package as engines use it: two processes that move bytes, and a store that is killed and comes back.

    BATON=/path/to/baton python3 -m unittest discover -s src/python/tests/python

The package must be importable; scripts/python.sh sees to all of it.
"""

import ctypes
import hashlib
import json
import logging
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest

from mooncake.engine import TransferEngine, TransferNotify, TransferOpcode
from mooncake.store import MooncakeDistributedStore, ReplicateConfig

BYTES = 1 << 20
TIME_LIMIT = 60
logging.getLogger("mooncake").addHandler(logging.NullHandler())


class Peer:
    """peer.py, and what it says."""

    def __init__(self, host="127.0.0.1"):
        script = pathlib.Path(__file__).with_name("peer.py")
        pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, str(script), host], **pipe)
        port, self.memory, self.foreign = map(int, self.process.stdout.readline().split())
        self.target = f"127.0.0.1:{port}"

    def digests(self):
        self.process.stdin.write("?\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().split()

    def end(self):
        self.process.kill()
        self.process.communicate()


class Memory:
    """Memory of this process, known by address."""

    def __init__(self, data):
        self.buffer = ctypes.create_string_buffer(bytes(data), len(data))
        self.address = ctypes.addressof(self.buffer)
        self.bytes = len(data)


def eventually(test, what, holds):
    limit = time.monotonic() + TIME_LIMIT
    while not holds():
        test.assertLess(time.monotonic(), limit, what)
        time.sleep(0.05)


class Engines(unittest.TestCase):
    def setUp(self):
        self.engine = TransferEngine()
        self.assertEqual(self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""), 0)
        self.memory = Memory(random.Random(7).randbytes(BYTES))
        self.assertEqual(self.engine.register_memory(self.memory.address, BYTES), 0)
        self.peer = Peer()
        self.addCleanup(lambda: self.peer.end())

    def write(self, remote, length=BYTES):
        return self.engine.transfer_sync_write(self.peer.target, self.memory.address, remote, length)

    def test_bytes_go_to_another_process_and_back(self):
        step = BYTES // 256
        order = random.Random(1).sample(range(256), 256)
        sources = [self.memory.address + at * step for at in order]
        sinks = [self.peer.memory + at * step for at in order]
        self.assertEqual(self.engine.batch_transfer_sync_write(self.peer.target, sources, sinks, [step] * 256), 0)
        digest = hashlib.sha256(self.memory.buffer.raw).hexdigest()
        self.assertEqual(self.peer.digests()[0], digest)
        back = Memory(bytes(BYTES))
        self.assertEqual(self.engine.batch_register_memory([back.address], [BYTES]), 0)
        self.assertEqual(self.engine.transfer_sync_read(self.peer.target, back.address, self.peer.memory, BYTES), 0)
        self.assertEqual(back.buffer.raw, self.memory.buffer.raw)
        self.assertEqual(self.engine.unregister_memory(back.address), 0)
        self.assertLess(self.engine.unregister_memory(back.address), 0)

    def test_foreign_addresses_are_refused_and_said_by_name(self):
        before = self.peer.digests()
        with self.assertLogs("mooncake.engine", "ERROR") as said:
            self.assertLess(self.write(self.peer.foreign, 100), 0)
            self.assertLess(self.write(self.peer.memory + BYTES - 50, 100), 0)
            other = Memory(b"not registered")
            code = self.engine.transfer_sync_write(self.peer.target, other.address, self.peer.memory, 8)
            self.assertLess(code, 0)
            self.assertLess(self.engine.register_memory(4096, 4096), 0)
            self.assertLess(self.engine.batch_transfer_sync_write(self.peer.target, [1, 2], [3], [4]), 0)
        self.assertIn(f"write to {self.peer.target}", said.output[0])
        self.assertEqual(self.peer.digests(), before)

    def test_a_killed_peer_is_a_failure_and_its_next_life_is_served(self):
        self.assertEqual(self.write(self.peer.memory), 0)
        self.peer.end()
        with self.assertLogs("mooncake.engine", "ERROR"):
            self.assertLess(self.write(self.peer.memory), 0)
        self.peer = Peer(self.peer.target)
        self.assertEqual(self.write(self.peer.memory), 0)
        self.assertEqual(self.peer.digests()[0], hashlib.sha256(self.memory.buffer.raw).hexdigest())

    def test_the_interpreter_runs_while_bytes_move(self):
        ended, ticks = threading.Event(), 0

        def move():
            for _ in range(50):
                self.assertEqual(self.write(self.peer.memory), 0)
            ended.set()

        mover = threading.Thread(target=move)
        mover.start()
        while not ended.is_set():
            ticks += 1
            time.sleep(0)
        mover.join()
        self.assertGreater(ticks, 50)

    def test_what_is_begun_is_asked_about(self):
        arguments = (self.peer.target, [self.memory.address], [self.peer.memory], [BYTES])
        batch = self.engine.batch_transfer_async_write(*arguments)
        self.assertGreater(batch, 0)
        self.assertEqual(self.engine.get_batch_transfer_status([batch]), 0)
        self.assertLess(self.engine.get_batch_transfer_status([batch]), 0)
        one = self.engine.transfer_submit_write(self.peer.target, self.memory.address, self.peer.memory, 9)
        eventually(self, "it ends", lambda: self.engine.transfer_check_status(one) == 1)
        there = TransferEngine()
        self.assertEqual(there.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""), 0)
        buffer = there.allocate_managed_buffer(4096)
        target = f"127.0.0.1:{there.get_rpc_port()}"
        notify = TransferNotify("name", "message")
        code = self.engine.transfer_sync(target, self.memory.address, buffer, 4096, TransferOpcode.Write, notify)
        self.assertEqual(code, 0)
        self.assertEqual([(one.name, one.msg) for one in there.get_notifies()], [("name", "message")])
        self.assertEqual(there.read_bytes_from_buffer(buffer, 64), self.memory.buffer.raw[:64])
        self.assertEqual(there.free_managed_buffer(buffer, 4096), 0)

    def test_what_cannot_be_is_refused(self):
        for arguments in [("127.0.0.1", "etcd://a:1", "tcp", ""), ("127.0.0.1", "P2PHANDSHAKE", "rdma", "")]:
            with self.assertLogs("mooncake.engine", "ERROR"):
                self.assertLess(TransferEngine().initialize(*arguments), 0)
        with self.assertLogs("mooncake.engine", "ERROR"):
            self.assertLess(TransferEngine().get_rpc_port(), 0)


class Server:
    """`baton store serve`."""

    def __init__(self, address):
        self.address = address
        command = [os.environ["BATON"], "store", "serve", "--listen", address, "--memory", "64MiB", "--allow-flush"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def free_address():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{taken.getsockname()[1]}"


@unittest.skipUnless(os.environ.get("BATON"), "set BATON to the program")
class Stores(unittest.TestCase):
    def setUp(self):
        self.servers = [Server(free_address()) for _ in range(2)]
        self.addCleanup(lambda: [server.kill() for server in self.servers])
        self.store = MooncakeDistributedStore()
        addresses = ",".join(server.address for server in self.servers)
        # As vLLM passes on what stands in the file of MOONCAKE_CONFIG_PATH.
        config = {"metadata_server": "P2PHANDSHAKE", "master_server_address": addresses, "protocol": "tcp"}
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(config, file)
            file.flush()
            read = json.loads(pathlib.Path(file.name).read_text())
        code = self.store.setup(
            "127.0.0.1", read["metadata_server"], 1 << 30, 1 << 30, read["protocol"], "", read["master_server_address"]
        )
        self.assertEqual(code, 0)
        eventually(self, "both answer", lambda: self.store.health_check() == 0)

    def spans(self, memory, count, sizes):
        each = sum(sizes)
        return [[memory.address + n * each, memory.address + n * each + sizes[0]] for n in range(count)]

    def test_values_of_many_buffers_come_back(self):
        count, sizes = 64, [3000, 5000]
        sent, got = Memory(random.Random(3).randbytes(count * sum(sizes))), Memory(bytes(count * sum(sizes)))
        for memory in (sent, got):
            self.assertEqual(self.store.register_buffer(memory.address, memory.bytes), 0)
        keys = [f"tiny@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@{n:064x}" for n in range(count)]
        config = ReplicateConfig()
        config.preferred_segment, config.group_ids = "there", ["a"] * count
        self.assertEqual(self.store.batch_is_exist(keys), [0] * count)
        put = self.store.batch_put_from_multi_buffers(keys, self.spans(sent, count, sizes), [sizes] * count, config)
        self.assertEqual(put, [0] * count)
        self.assertEqual(self.store.batch_is_exist(keys), [1] * count)
        into = self.spans(got, count, sizes)
        answers = self.store.batch_get_into_multi_buffers(keys, into, [sizes] * count)
        self.assertEqual(answers, [sum(sizes)] * count)
        self.assertEqual(got.buffer.raw, sent.buffer.raw)
        short = [[sizes[0], sizes[1] - 1]] * count
        self.assertTrue(all(answer < 0 for answer in self.store.batch_get_into_multi_buffers(keys, into, short)))
        described = self.store.batch_get_replica_desc(keys + ["none"])
        self.assertEqual(sorted(described), sorted(keys))
        self.assertTrue(described[keys[0]][0].is_memory_replica())
        self.assertEqual(self.store.get_size(keys[0]), sum(sizes))
        self.assertEqual(self.store.remove(keys[0]), 0)
        self.assertEqual(self.store.is_exist(keys[0]), 0)
        self.assertEqual(self.store.remove_all(force=True), count - 1)

    def test_memory_that_is_not_registered_is_not_touched(self):
        foreign = Memory(b"not registered")
        with self.assertLogs("mooncake.store", "WARNING") as said:
            self.assertLess(self.store.batch_put_from(["k"], [foreign.address], [8])[0], 0)
        self.assertIn("register_buffer", said.output[0])
        self.assertEqual(self.store.put("k", b"8 bytes!"), 0)
        self.assertLess(self.store.get_into("k", foreign.address, 8), 0)
        self.assertEqual(foreign.buffer.raw, b"not registered")

    def test_values_that_are_bytes(self):
        for value in (b"bytes", bytearray(b"an array"), memoryview(b"a view"), b""):
            self.assertEqual(self.store.put(f"k{len(value)}", value), 0)
            self.assertEqual(self.store.get(f"k{len(value)}"), bytes(value))
        self.assertEqual(self.store.put_batch(["a", "b"], [b"1", b"2"]), 0)
        self.assertEqual(self.store.get_batch(["a", "none", "b"]), [b"1", b"", b"2"])
        got = self.store.batch_get_buffer(["k8", "none", "k0"])
        self.assertEqual([value is None for value in got], [False, True, False])
        self.assertIsNone(self.store.get_buffer("none"))
        handle = got[0]
        self.assertEqual((handle.size(), len(handle), bytes(memoryview(handle)[2:])), (8, 8, b" array"))
        self.assertEqual(ctypes.string_at(handle.ptr(), handle.size()), b"an array")
        self.assertEqual((got[2].size(), bytes(got[2])), (0, b""))
        self.assertLess(self.store.get_size("none"), 0)
        self.assertEqual(self.store.close(), 0)
        self.assertEqual(self.store.batch_is_exist(["a"]), [0])

    def test_a_store_killed_and_restarted(self):
        keys = [f"key {n}" for n in range(40)]
        self.assertEqual(self.store.put_batch(keys, [b"value"] * 40), 0)
        self.servers[0].kill()
        found = self.store.batch_is_exist(keys)
        self.assertIn(0, found)
        self.assertIn(1, found)
        self.assertEqual([bool(value) for value in self.store.get_batch(keys)], [one == 1 for one in found])
        # The other store takes the keys of the one that is away.
        self.assertEqual(self.store.put_batch(keys, [b"value"] * 40), 0)
        self.assertEqual(self.store.batch_is_exist(keys), [1] * 40)
        self.servers[0] = Server(self.servers[0].address)
        eventually(self, "it is back", lambda: self.store.put_batch(keys, [b"value"] * 40) == 0)
        self.assertEqual(self.store.batch_is_exist(keys), [1] * 40)


if __name__ == "__main__":
    unittest.main()
