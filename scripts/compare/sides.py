"""The routers that are compared, and the stand-ins before which they are put."""

import os
import subprocess
import sys

import processes
from processes import Failed

# Versions on PyPI of the peers and of the package that trains the tokenizer.
PINNED = {"sglang-router": "0.3.2", "vllm-router": "0.1.17", "tokenizers": "0.23.3"}
WHOLE = 4
PREFILL = 2
DECODE = 2
# Given in place of a tokenizer's folder: one token a byte.
BYTES = "bytes"


def venv(folder, package):
    """The programs of a package in a virtual environment of its own, made when it is not there."""
    place = os.path.join(folder, f"{package}-{PINNED[package]}")
    programs = os.path.join(place, "bin")
    done = os.path.join(place, "installed")
    if not os.path.exists(done):
        print(f"compare: installing {package} {PINNED[package]} in {place}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        pip = [os.path.join(programs, "pip"), "install", "-q", "--disable-pip-version-check", f"{package}=={PINNED[package]}"]
        subprocess.run(pip, check=True)
        with open(done, "w", encoding="utf-8"):
            pass
    return programs


def block_tokens(model):
    """Tokens in a block: as many as vLLM has, or about as much text if a token is a byte."""
    return 64 if model == BYTES else 16


def tokenizer(folder):
    """The folder of the trained tokenizer. Trains it on this repository if it is missing."""
    place = os.path.join(folder, "tokenizer-32k")
    # tokenizer.py writes this file last.
    if not os.path.exists(os.path.join(place, "tokenizer_config.json")):
        print(f"compare: training a tokenizer in {place}", file=sys.stderr)
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tokenizer.py")
        subprocess.run([os.path.join(venv(folder, "tokenizers"), "python"), script, place], check=True, stdout=sys.stderr)
    return place


class Backends:
    """Stand-ins of one kind in one process: four of whole requests, or two pairs, and one that is called directly."""

    def __init__(self, group, setup, engine, pairs, cost=()):
        count = PREFILL + DECODE if pairs else WHOLE
        ports = processes.free_ports(count + 1 + PREFILL)
        self.engine, self.pairs = engine, pairs
        self.ports, self.direct, self.bootstraps = ports[:count], ports[count], ports[count + 1:]
        lists = {"whole": [self.direct] if pairs else [*self.ports, self.direct]}
        if pairs:
            lists |= {"prefill": self.ports[:PREFILL], "decode": self.ports[PREFILL:], "bootstrap": self.bootstraps}
        words = [setup.stand_in, "--engine", engine, "--block-tokens", str(block_tokens(setup.model)), *cost]
        if setup.model != BYTES:
            words += ["--tokenizer", setup.model]
        for name, listed in lists.items():
            words += [f"--{name}", ",".join(map(str, listed))]
        self.process = group.start("stand-ins", setup.others, words)
        group.until("stand-ins", lambda: all(processes.page(f"{url}/health") is not None for url in [*self.urls(), self.direct_url()]))

    def urls(self):
        """Where those are that a router serves from."""
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    def direct_url(self):
        """Where the one is that is called without a router."""
        return f"http://127.0.0.1:{self.direct}"

    def counted(self):
        """Prompt tokens that each engine was asked to prefill, and those of them that it had: as it counts them."""
        names = {"vllm": ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
                 "sglang": ("sglang:prompt_tokens_total", "sglang:cached_tokens_total")}[self.engine]
        counts = []
        for url in self.urls():
            rows = [line.split() for line in (processes.page(f"{url}/metrics") or "").splitlines()]
            found = {row[0].split("{")[0]: float(row[1]) for row in rows if len(row) == 2}
            counts.append(tuple(int(found[name]) for name in names))
        return counts


def sglang_router(setup, backends, port, metrics):
    """The command line of sglang-router."""
    words = [os.path.join(setup.venvs["sglang-router"], "python"), "-m", "sglang_router.launch_router"]
    if backends.pairs:
        words.append("--pd-disaggregation")
        for url, bootstrap in zip(backends.urls()[:PREFILL], backends.bootstraps):
            words += ["--prefill", url, str(bootstrap)]
        for url in backends.urls()[PREFILL:]:
            words += ["--decode", url]
    else:
        words += ["--worker-urls", *backends.urls()]
    return [*words, "--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware", "--prometheus-port", str(metrics),
            "--log-level", "warn"]


def vllm_router(setup, backends, port, metrics):
    """The command line of vllm-router."""
    words = [os.path.join(setup.venvs["vllm-router"], "vllm-router")]
    if backends.pairs:
        words.append("--vllm-pd-disaggregation")
        for url in backends.urls()[:PREFILL]:
            words += ["--prefill", url]
        for url in backends.urls()[PREFILL:]:
            words += ["--decode", url]
    else:
        words += ["--worker-urls", *backends.urls()]
    return [*words, "--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware", "--prometheus-port", str(metrics),
            "--log-level", "warning"]


# Everything that is not about limits of time is Baton's own: no request is refused here that a peer would take.
CONFIG = """[scheduler]
block_tokens = {block_tokens}
fetch = false

[[scheduler.classes]]
name = "default"
ttft_us = 600_000_000
tbt_us = 60_000_000
"""

# What a prompt costs the stand-ins, as a measured profile of a real engine would say.
PROFILE = """name = "stand-in"
source = "scripts/compare: what the stand-ins are told to take"
kv_bytes_per_token = 1
kv_capacity_tokens = 8388608
layers = 1
shared_us = 1000.0

[fit]
prefill_points = 2
prefill_mape_pct = 0.0
prefill_worst_pct = 0.0
decode_points = 1
decode_mape_pct = 0.0
decode_worst_pct = 0.0

[valid]
max_prompt_tokens = 262144
max_batch = 128
max_context_tokens = 262144

[prefill]
knots_tokens = [0, 131072]
knots_us = [1000.0, {longest_us}]
attention_ps_per_pair = 0.0

[decode]
batches = [1, 128]
base_us = [1000.0, 1000.0]
context_ps_per_token = [0.0, 0.0]
"""


class Router:
    """One router before its backends, on a core of its own."""

    def __init__(self, group, setup, name, backends, prompt_token_us=0):
        self.name = name
        self.port, metrics, control = processes.free_ports(3)
        self.nodes = []
        if name == "baton":
            self.start_baton(group, setup, backends, control, prompt_token_us)
        else:
            words = {"sglang-router": sglang_router, "vllm-router": vllm_router}[name](setup, backends, self.port, metrics)
            self.process = group.start(name, setup.core, words)
        chat = '{"model":"tiny","messages":[{"role":"user","content":"ready?"}],"max_tokens":1}'
        group.until(name, lambda: processes.asked(f"{self.url()}/v1/chat/completions", chat), 90)
        # Each pair of engines is met once, so that no connection is new in what is measured.
        for _ in range(20):
            processes.asked(f"{self.url()}/v1/chat/completions", chat)
        started = processes.children(self.process.pid)
        if started:
            raise Failed(f"{name} has started {len(started)} processes, whose time nobody would count")

    def start_baton(self, group, setup, backends, control, prompt_token_us):
        """The router on its core; it drives the engines by itself, or, if so asked, by a node beside each on the engines' cores."""
        config, profile, servers = (os.path.join(group.folder, name) for name in ("baton.toml", "profile.toml", "servers.toml"))
        with open(config, "w", encoding="utf-8") as file:
            file.write(CONFIG.format(block_tokens=block_tokens(setup.model)))
        with open(profile, "w", encoding="utf-8") as file:
            file.write(PROFILE.format(longest_us=float(1000 + 131072 * prompt_token_us)))
        words = [setup.baton, "serve", "-c", config, "--model", setup.model, "--listen", f"127.0.0.1:{self.port}", "--control", f"127.0.0.1:{control}",
                 "--threads", "1", "--log", "warn"]
        if not setup.args.nodes:
            with open(servers, "w", encoding="utf-8") as file:
                file.writelines(self.member(backends, at) for at in range(len(backends.ports)))
            words += ["--servers", servers, "--each", f"--engine {backends.engine} --model {setup.model} --profile {profile}"]
        self.process = group.start("baton", setup.core, words)
        for at, url in enumerate(backends.urls() if setup.args.nodes else []):
            words = [setup.baton, "node", "--name", f"n{at}", "--role", self.role(backends, at), "--conductor", f"http://127.0.0.1:{control}",
                     "--engine", backends.engine, "--model", setup.model, "--url", url, "--block-tokens", str(block_tokens(setup.model)),
                     "--profile", profile, "--log", "warn"]
            if self.bootstrap(backends, at):
                words += ["--bootstrap-port", self.bootstrap(backends, at)]
            self.nodes.append(group.start(f"node-{at}", setup.others, words).pid)
        group.until("baton", lambda: processes.page(f"{self.url()}/ready") is not None, 90)

    @staticmethod
    def role(backends, at):
        """What an engine does."""
        return "both" if not backends.pairs else "prefill" if at < PREFILL else "decode"

    @staticmethod
    def bootstrap(backends, at):
        """The bootstrap port of an engine that has one."""
        return str(backends.bootstraps[at]) if backends.pairs and backends.engine == "sglang" and at < PREFILL else None

    def member(self, backends, at):
        """An engine on the list of servers."""
        port = self.bootstrap(backends, at)
        labels = f'labels = {{ bootstrap-port = "{port}" }}\n' if port else ""
        address = f"127.0.0.1:{backends.ports[at]}"
        return f'[[member]]\nname = "n{at}"\nrole = "{self.role(backends, at)}"\naddresses = ["{address}"]\n{labels}'

    def url(self):
        """Where it serves."""
        return f"http://127.0.0.1:{self.port}"
