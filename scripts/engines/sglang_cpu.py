#!/usr/bin/env python3
"""Starts SGLang on a machine without a GPU, a pair's servers included: SGLang's own options follow.

    sglang_cpu.py --model-path /folder/of/a/model --port 30000 ...

SGLang has a path for CPUs that its prefill/decode code and its packaged kernels were not written for:

* the kernels are linked against the driver's libcuda.so.1; where there is none, a library whose every function answers "no
  device" is compiled in its place (gcc is needed);
* events and streams of torch.cuda become ones that are always done, for everything is in order on a CPU;
* seeds of requests count only with --enable-deterministic-inference, which knows GPU attention only: torch's own is added to
  its list, its batch-invariant GPU kernels are left out, and its hash of seed, position and token is done by torch.

Server processes are spawned, which imports this file again: what it changes reaches them too.
"""

import ctypes
import os
import pathlib
import subprocess
import sys
import tempfile

NO_DEVICE = """
int cuInit(unsigned flags) { return 100; }
int cuDeviceGetCount(int *count) { if (count) *count = 0; return 100; }
"""


def stand_in_driver():
    """Starts this program again with a libcuda.so.1 that has no devices, where the machine has none at all."""
    try:
        ctypes.CDLL("libcuda.so.1")
        return
    except OSError:
        pass
    import importlib.util

    folder = pathlib.Path(sys.prefix) / "lib" / "no-cuda"
    folder.mkdir(parents=True, exist_ok=True)
    kernels = pathlib.Path(importlib.util.find_spec("sgl_kernel").submodule_search_locations[0])
    wanted = set()
    for library in kernels.rglob("*.so"):
        listed = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True)
        names = (line.split()[-1].split("@")[0] for line in listed.stdout.splitlines() if line.strip())
        wanted |= {name for name in names if name.startswith("cu") and name[2:3].isupper()}
    wanted -= {"cuInit", "cuDeviceGetCount"}
    source = NO_DEVICE + "".join(f"int {name}(void) {{ return 100; }}\n" for name in sorted(wanted))
    made = ["gcc", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-x", "c", "-", "-o"]
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        subprocess.run([*made, f"{aside}/made"], input=source, text=True, check=True)
        os.replace(f"{aside}/made", folder / "libcuda.so.1")
    found = os.environ.get("LD_LIBRARY_PATH")
    os.environ["LD_LIBRARY_PATH"] = f"{folder}:{found}" if found else str(folder)
    os.execv(sys.executable, [sys.executable, *sys.argv])


if __name__ == "__main__":
    stand_in_driver()
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("MC_FORCE_TCP", "1")
os.environ.setdefault("MOONCAKE_PROTOCOL", "tcp")

import torch


class Done:
    """An event, or a stream, on which there is never anything to wait for."""

    def __init__(self, *_, **__):
        pass

    def query(self):
        return True

    def elapsed_time(self, _):
        return 0.0

    def record(self, *_, **__):
        return self

    def record_event(self, *_, **__):
        return Done()

    def wait(self, *_, **__):
        pass

    synchronize = wait_event = wait_stream = wait


torch.cuda.Event = Done
torch.cuda.current_stream = Done
pageable = torch.empty
torch.empty = lambda *a, **k: pageable(*a, **{name: value for name, value in k.items() if name != "pin_memory"})

from sglang.kernels.ops.sampling import murmur_hash
from sglang.srt import batch_invariant_ops
from sglang.srt.arg_groups import choices

choices.add_deterministic_attention_backend_choices(["torch_native"])
choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
batch_invariant_ops.enable_batch_invariant_mode = lambda *_, **__: None


def hashed(seed, positions, columns):
    """32 bits of each seed, position and column, alike on every server that is started by this program."""
    low = 0xFFFFFFFF
    mixed = seed.to(torch.int64) * 0x9E3779B1 + (positions.to(torch.int64) + 1) * 0x85EBCA6B
    mixed = (mixed ^ (mixed >> 29)).unsqueeze(1) + columns.to(torch.int64).unsqueeze(0) * 0xC2B2AE3D
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        mixed = ((mixed & low) ^ ((mixed & low) >> shift)) * factor
    return (mixed & low) ^ ((mixed & low) >> 16)


murmur_hash.murmur_hash32 = hashed

CPU = {"--device": "cpu", "--attention-backend": "torch_native", "--sampling-backend": "pytorch", "--mem-fraction-static": "0.1"}

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    given = sys.argv[1:]
    for name, value in CPU.items():
        given += [] if name in given else [name, value]
    # An idle server would keep a core busy.
    given += ["--disable-overlap-schedule", "--enable-deterministic-inference", "--sleep-on-idle"]
    if "decode" in given:
        # Kept elsewhere, what is set aside needs a GPU.
        given += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
    load_plugins()
    run_server(prepare_server_args(given))
