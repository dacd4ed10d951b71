#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What `mooncake.engine` costs: whichever package of that name is in the search path, Baton's or another.

    PYTHONPATH=FOLDER_OF_THE_PACKAGE mooncake_bench.py [--seconds 5] [--block 16,64,1024] [--blocks 256]

Two processes on loopback; each round writes blocks of one size, in shuffled order, with batch_transfer_sync_write. Prints
the processor time of both processes for each GB and each call, which says something on a busy machine too; rates do not.
With --store HOST:PORT the same for batch_put_from_multi_buffers and batch_get_into_multi_buffers of `mooncake.store`; the
server's processor time is counted where --server-pid is given.
"""

import argparse
import ctypes
import itertools
import os
import random
import subprocess
import sys
import time

BYTES = 64 << 20


def cpu(pid):
    """Processor time of a process so far, seconds."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def engine():
    from mooncake.engine import TransferEngine

    started = TransferEngine()
    assert started.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    memory = ctypes.create_string_buffer(os.urandom(1 << 20) * (BYTES >> 20), BYTES)
    address = ctypes.addressof(memory)
    assert started.batch_register_memory([address], [BYTES]) == 0
    return started, memory, address


def peer():
    started, _memory, address = engine()
    print("peer", started.get_rpc_port(), address, flush=True)
    sys.stdin.read()
    os._exit(0)


def report(what, block, seconds, calls, moved, spent):
    print(f"{what} {block >> 10} KiB: {spent / (moved / 1e9):.3f} CPU s/GB, {spent / calls * 1e6:.0f} us CPU/call, "
          f"{moved / seconds / 1e9:.2f} GB/s, {calls} calls", flush=True)


def transfers(args):
    started, _memory, address = engine()
    child = subprocess.Popen([sys.executable, __file__, "--peer"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    line = next(line for line in child.stdout if line.startswith("peer "))
    port, there = map(int, line.split()[1:])
    for block in args.block:
        spots = random.Random(1).sample(range(BYTES // block), min(args.blocks, BYTES // block))
        lists = ([address + at * block for at in spots], [there + at * block for at in spots], [block] * len(spots))
        once = lambda: started.batch_transfer_sync_write(f"127.0.0.1:{port}", *lists)
        assert once() == 0
        before, began, calls = cpu("self") + cpu(child.pid), time.monotonic(), 0
        while time.monotonic() - began < args.seconds:
            assert once() == 0
            calls += 1
        spent, seconds = cpu("self") + cpu(child.pid) - before, time.monotonic() - began
        report("write", block, seconds, calls, calls * len(spots) * block, spent)
    child.kill()


def objects(args):
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig

    store = MooncakeDistributedStore()
    metadata, size = args.metadata, 512 << 20
    assert store.setup("127.0.0.1", metadata, size, 64 << 20, "tcp", "", args.store) == 0
    memory = ctypes.create_string_buffer(os.urandom(1 << 20) * (BYTES >> 20), BYTES)
    address = ctypes.addressof(memory)
    assert store.register_buffer(address, BYTES) == 0
    spent_by_all = lambda: cpu("self") + (cpu(args.server_pid) if args.server_pid else 0)
    for block in args.block:
        # Each value has two buffers, as keys and values of a layer are.
        count = min(args.blocks, BYTES // block)
        sizes = [[block // 2] * 2] * count
        spans = [[address + at * block, address + at * block + block // 2] for at in range(count)]
        puts = gets = calls = 0
        # Rounds before the first touch every page that is used, and are not counted.
        for round in itertools.count(-4):
            if round == 0:
                puts, gets, calls, began = 0, 0, 0, time.monotonic()
            if round > 0 and time.monotonic() - began >= args.seconds:
                break
            keys = [f"bench@{block}@{round % 4}@{at}" for at in range(count)]
            store.batch_remove(keys, True)
            before = spent_by_all()
            assert store.batch_put_from_multi_buffers(keys, spans, sizes, ReplicateConfig()) == [0] * count
            between = spent_by_all()
            assert store.batch_get_into_multi_buffers(keys, spans, sizes) == [block] * count
            puts, gets, calls = puts + between - before, gets + spent_by_all() - between, calls + 1
        seconds = time.monotonic() - began
        for what, spent in (("put", puts), ("get", gets)):
            report(what, block, seconds, calls, calls * count * block, spent)
    store.close()


def main():
    parser = argparse.ArgumentParser(description="What mooncake.engine or mooncake.store costs.")
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--block", type=lambda text: [int(kib) << 10 for kib in text.split(",")], default="16,64,1024")
    parser.add_argument("--blocks", type=int, default=256, help="blocks of a call, at most 64 MiB together")
    parser.add_argument("--store", metavar="HOST:PORT", help="measure mooncake.store over this server")
    parser.add_argument("--server-pid", type=int, help="a process whose time counts too")
    parser.add_argument("--metadata", default="P2PHANDSHAKE", help="for a package whose store wants another")
    args = parser.parse_args()
    peer() if args.peer else (objects if args.store else transfers)(args)
    # Some packages hang or crash when the interpreter takes them down.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
