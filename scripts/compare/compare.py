#!/usr/bin/env python3
"""Baton beside sglang-router and vllm-router before the same stand-ins of engines: docs/compare.md says what comes of it.

    cargo build --release -p baton --bin baton
    cargo build --release -p baton-remote --features testing --example stand_in
    scripts/compare/compare.py --trace conversation_trace.jsonl --json compare.json

Linux, Python 3.9 or later, two cores or more, and PyPI for the first run. One router runs at a time, on a core of its own; the stand-ins,
Baton's nodes and the load share the others. About ten minutes; less with --only and --quick. Tables in Markdown come at the end;
`scripts/compare/tables.py compare.json` prints them again.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time

import processes
import sides
import tables
import trace
from processes import Failed

# Callers who each send as soon as they have their answer: what a call costs when the router's core is full.
CALLERS = 32
# Calls a second where the router has time: what it adds to each.
RATES = {"small": 200, "large": 15}
# Of the trace: its first seconds, so many times as fast. Engines are busy two thirds of the time then.
SLICE = {"window_s": 600, "quicken": 30, "most_output_tokens": 8}
# Total size of all caches, and the time of a prompt token if one engine has all the work. Both count tokens of the trace. A replayed
# prompt has exactly the tokens that the trace says: letters with --tokenizer bytes, else short words of about four bytes. So the
# values do not depend on the tokenizer: engines are as busy with either, and caches can find the same share.
CACHE_TOKENS = 1 << 21
PROMPT_TOKEN_US = 1


class Setup:
    """Programs, cores and folders."""

    def __init__(self, args, folder):
        target = os.environ.get("CARGO_TARGET_DIR", "target")
        self.baton = os.environ.get("BATON", os.path.join(target, "release", "baton"))
        self.stand_in = os.environ.get("STAND_IN", os.path.join(target, "release", "examples", "stand_in"))
        for program in (self.baton, self.stand_in):
            if not os.access(program, os.X_OK):
                raise Failed(f"{program} is not there; build it as `{sys.argv[0]} --help` says")
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            raise Failed("one core is too few: the router needs one of its own")
        self.core, self.others = str(cores[0]), ",".join(map(str, cores[1:]))
        self.args, self.folder = args, folder
        self.model = args.tokenizer or sides.tokenizer(args.venvs)
        if self.model != sides.BYTES:
            self.model = os.path.abspath(self.model)
        if any(letter.isspace() for letter in self.model):
            raise Failed(f"{self.model}: a path with spaces cannot be passed on to servers; give another --venvs or --tokenizer")
        peers = {run[1] for run in args.only if run[1] != "baton"}
        self.venvs = {name: sides.venv(args.venvs, name) for name in sorted(peers)}

    def tool(self, *words):
        """Runs a command of Baton's as a load, and returns what it has written as JSON."""
        out = os.path.join(self.folder, "out.json")
        if os.path.exists(out):
            os.remove(out)
        done = subprocess.run(["taskset", "-c", self.others, self.baton, *words, "--json", out], text=True, check=False,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=300)
        if not os.path.exists(out):
            raise Failed(f"{' '.join(words[:3])}: {done.stderr.strip()[-500:]}")
        with open(out, encoding="utf-8") as file:
            return json.load(file)


def load(setup, router, backends, *words):
    """One load on the router and, in turn, on an engine without it."""
    beside = ["--beside", ",".join(map(str, router.nodes))] if router.nodes else []
    report = setup.tool("bench", "router", "--url", router.url(), "--direct-url", backends.direct_url(), "--pid",
                        str(router.process.pid), "--model", "tiny", *beside, *words)
    return {(row["load"], row["side"]): row for row in report["figures"]}, report


def pace(setup, name, engine, pairs):
    """What a router costs and adds, and the memory that it takes."""
    seconds = 1 if setup.args.quick else 3
    with processes.Group(setup.folder) as group:
        backends = sides.Backends(group, setup, engine, pairs)
        router = sides.Router(group, setup, name, backends)
        pids = [router.process.pid, *router.nodes]
        idle = [processes.memory_mb(pid)[0] for pid in pids]
        full, report = load(setup, router, backends, "--callers", str(CALLERS), "--duration", str(seconds), "--rounds", "3")
        after = [processes.memory_mb(pid) for pid in pids]
        rates = ["--rate", str(RATES["small"]), "--large-rate", str(RATES["large"]), "--loads", "small,large-seen"]
        calm, _ = load(setup, router, backends, *rates, "--duration", str(seconds), "--rounds", "3")
        group.check()
    by_event = [row["cpu_us_per_event"] for row in report["events"] if row["side"] == "router"]
    return {
        "full": [row for row in full.values()],
        "calm": [row for row in calm.values()],
        "cpu_us_per_event": by_event[0] if by_event else None,
        "memory_mb": {"idle": idle[0], "after": after[0][0], "highest": after[0][1],
                      "nodes_idle": sum(idle[1:]), "nodes_after": sum(now for now, _ in after[1:])},
    }


def replay(setup, name, engine, pairs):
    """What the engines' caches found of a slice of the trace."""
    prefilling = sides.PREFILL if pairs else sides.WHOLE
    tokens_each, token_us = CACHE_TOKENS // prefilling, PROMPT_TOKEN_US * prefilling
    cost = ["--cache-blocks", str(tokens_each // sides.block_tokens(setup.model)), "--prompt-token-us", str(token_us)]
    words = [] if setup.model == sides.BYTES else ["--tokenizer", setup.model]
    with processes.Group(setup.folder) as group:
        backends = sides.Backends(group, setup, engine, pairs, cost)
        router = sides.Router(group, setup, name, backends, token_us)
        before, spent = backends.counted(), [processes.cpu_us([router.process.pid]), processes.cpu_us(router.nodes)]
        report = setup.tool("replay", setup.slice, "--dialect", "mooncake", "--live", router.url(), "--model", "tiny", "--text",
                            "--timeout", "60", *words)
        # A leg that goes on after its answer has ended is counted too.
        time.sleep(0.5)
        counts = [[after - then for after, then in zip(now, old)] for now, old in zip(backends.counted(), before)]
        spent = [processes.cpu_us([router.process.pid]) - spent[0], processes.cpu_us(router.nodes) - spent[1]]
        group.check()
    run, live = report["runs"][0], report["live"]
    asked, cached = (sum(each) for each in zip(*counts))
    return {
        "completed": run["completed"], "sent": live["sent"], "errors": live["errors"], "statuses": live["statuses"],
        "ttft_s": run["ttft_s"], "asked_tokens": asked, "cached_tokens": cached, "cached_share": cached / max(asked, 1),
        "by_engine": counts, "late": live["late"],
        "cpu_us_per_request": spent[0] / max(live["sent"], 1), "nodes_cpu_us_per_request": spent[1] / max(live["sent"], 1),
    }


def prepare_slice(setup):
    """Writes the slice where it is replayed from; what caches could find of it."""
    window_s = SLICE["window_s"] / (4 if setup.args.quick else 1)
    rows = trace.slice_of(setup.args.trace, window_s, SLICE["quicken"], SLICE["most_output_tokens"])
    setup.slice = os.path.join(setup.folder, "slice.jsonl")
    with open(setup.slice, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    best = {place: trace.references(rows, engines, CACHE_TOKENS // engines)
            for place, engines in (("whole", sides.WHOLE), ("pairs", sides.PREFILL))}
    return {"requests": len(rows), "prompt_tokens": sum(row["input_length"] for row in rows), **SLICE, "window_s": window_s,
            "found_at_best": best}


def machine():
    """What it ran on."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        models = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return {"cpu": models[0] if models else platform.machine(), "cores": len(os.sched_getaffinity(0)), "kernel": platform.release(),
            "load_average": os.getloadavg()}


# Arrangement, router, engine. Baton goes before either's engines, beside the peer that is made for them.
RUNS = [(place, name, engine) for place in ("whole", "pairs")
        for name, engine in (("sglang-router", "sglang"), ("baton", "sglang"), ("vllm-router", "vllm"), ("baton", "vllm"))]


def chosen(text):
    """The runs that match some of the words."""
    words = text.split(",")
    found = [run for run in RUNS if all(any(word in part for part in run) for word in words)]
    if not found:
        raise argparse.ArgumentTypeError(f"no run of {text}; runs are {', '.join('/'.join(run) for run in RUNS)}")
    return found


def arguments():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", help="a trace with block ids, as Mooncake publishes them (conversation_trace.jsonl); without, no caches are compared")
    parser.add_argument("--json", default="compare.json", help="where the figures are written [compare.json]")
    parser.add_argument("--only", type=chosen, default=RUNS, help="words that runs must match, like whole,vllm")
    parser.add_argument("--quick", action="store_true", help="a third of the time: to see that it works")
    parser.add_argument("--nodes", action="store_true", help="a `baton node` process beside each engine, in place of `baton serve --servers`")
    default = os.path.join(os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache")), "baton-compare")
    parser.add_argument("--venvs", default=default, help=f"folder of the peers' virtual environments and of the tokenizer [{default}]")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="tokenizer of engines and routers, as scripts/compare/tokenizer.py writes it; "
                        "bytes: one token a byte [a BPE of 32,000 tokens, trained in the folder of --venvs]")
    return parser.parse_args()


def measure(setup, document):
    """Every run; one that fails is written down, and the others go on."""
    for place, name, engine in setup.args.only:
        print(f"compare: {place}, {name} before {engine}", file=sys.stderr)
        run = {"place": place, "router": name, "engine": engine}
        document["runs"].append(run)
        try:
            run["pace"] = pace(setup, name, engine, place == "pairs")
            if setup.args.trace:
                run["replay"] = replay(setup, name, engine, place == "pairs")
        except (Failed, OSError, subprocess.TimeoutExpired) as error:
            run["failed"] = str(error)
            print(f"compare: {error}", file=sys.stderr)


def main():
    """Runs what is asked for, and prints the tables."""
    args = arguments()
    # What was started ends with this, however that ends.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = tempfile.mkdtemp(prefix="baton-compare-")
    try:
        setup = Setup(args, folder)
        version = subprocess.run([setup.baton, "--version"], text=True, capture_output=True, check=True).stdout.strip()
        document = {"versions": {"baton": version, **sides.PINNED}, "machine": machine(), "callers": CALLERS, "rates": RATES,
                    "tokenizer": setup.model, "block_tokens": sides.block_tokens(setup.model), "runs": []}
        if args.trace:
            document["slice"] = prepare_slice(setup)
        started = time.monotonic()
        measure(setup, document)
        document["took_s"] = round(time.monotonic() - started)
    except (Failed, OSError, subprocess.CalledProcessError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 1
    with open(args.json, "w", encoding="utf-8") as file:
        json.dump(document, file, indent=1)
    print(tables.text(document))
    print(f"compare: figures in {args.json}, logs in {folder}", file=sys.stderr)
    return 1 if any("failed" in run for run in document["runs"]) else 0


if __name__ == "__main__":
    sys.exit(main())
