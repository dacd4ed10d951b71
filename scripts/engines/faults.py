#!/usr/bin/env python3
"""What must not be reachable through Baton: a wrong answer told as a good one, and a request that ends an engine.

    faults.py --baton http://127.0.0.1:8080 --alone http://127.0.0.1:8100 --prefill URL --decode URL --run FOLDER ...

First requests that mean harm, then, under load, processes that are killed or stopped and go on: the servers of the pair, and
Baton's nodes beside them, by their process groups in FOLDER (see pair.sh). While that happens an answer may fail, with a status
or an error that says so; none may be other than one engine's alone. After each, all that was killed is started again, both
servers live, and answers are equal. Prints one line a check; the exit status says whether all held.
"""

import argparse
import asyncio
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import aiohttp

from check import FAILED, FAILURES, WORDS, ask, clients, say, settled

# Fields that name KV, places, calls or ranks, as no client may.
FORGED = {
    "bootstrap_host": ["10.255.255.1", "127.0.0.1", ["127.0.0.1"], "", 7],
    "bootstrap_port": [1, 8998, 18998, [18998], -1, "x"],
    "bootstrap_room": [7, 0, -1, 2**63, [7, 8], "x", {}],
    "bootstrap_pair_key": ["x", ["x"], 1],
    "decode_tp_size": [8, -1, "x"],
    "rid": ["one", ["one", "one"], 7],
    "request_id": ["one", 7],
    "routed_dp_rank": [5, -1, "x"],
    "data_parallel_rank": [5, -1, "x"],
    "disagg_prefill_dp_rank": [5, -1, "x"],
    "data_parallel_rank_decode": [5],
    "kv_transfer_params": [
        {},
        "x",
        [1],
        {"do_remote_prefill": True},
        {"do_remote_decode": True},
        {"do_remote_prefill": True, "do_remote_decode": True},
        {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "one"},
        {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2]], "remote_engine_id": "x",
         "remote_request_id": "x", "remote_host": "127.0.0.1", "remote_port": 18600, "tp_size": 1, "remote_num_tokens": 64},
        {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "x",
         "remote_bootstrap_addr": "http://127.0.0.1:18998", "transfer_id": "one"},
    ],
    "ec_transfer_params": [{}, "x", {"do_remote_encode": True}],
    "vllm_xargs": [
        {"kv_transfer_params": "x"},
        {"kv_transfer_params": ["do_remote_prefill"]},
        {"kv_transfer_params": 7, "mine": 1},
        {"ec_transfer_params": "x"},
    ],
    "session_id": ["one"],
    "conversation_id": ["one"],
    "kv_hints": [{"a": 1}, "x"],
    "encoder_urls": [["http://10.255.255.1:1"]],
    "need_wait_for_mm_inputs": [True],
    "num_items_assigned": [{"image": [1]}],
    "http_worker_ipc": ["ipc:///tmp/nobody", "x"],
    "positional_embed_overrides": [{"a": 1}, "x"],
    "multi_item_delimiter_indices": [[0, 1], [[0]], "x"],
    "token_indices_to_pool": [[0], "x"],
    "watermark": [{"a": 1}, "x"],
    "custom_params": [{"a": 1}, "x"],
    "lora_id": ["x"],
    "modalities": [["image"]],
    "return_routed_experts": [True],
    "return_bytes": [True],
    "external_trace_header": [{"a": 1}],
    "received_time": ["x", -1],
    "routed_experts_start_len": [10**9, -1],
    "return_indexer_topk": [True],
    "return_sampling_mask": [True],
    "background": [True],
    "priority": [5, "x", 2**70],
    "extra_key": ["mine", 7, ["a", "b"]],
    "cache_salt": ["mine", 7, ["a", "b"]],
    "repetition_detection": ["x", {"max_pattern_size": -1}],
    "thinking_token_budget": [-5, "x"],
    "max_thinking_tokens": [-5, "x"],
    "truncate_prompt_tokens": [1, -1],
    "prompt_embeds": ["AAAA"],
    "input_embeds": [[[0.1]]],
    "mm_payload": [{"a": 1}],
    "image_data": ["AAAA"],
    "session_params": [{"id": "x", "rid": "y"}],
    "custom_logit_processor": ["AAAA"],
    "use_beam_search": [True],
}
HEADERS = [{"x-request-id": "one"}, {"x-data-parallel-rank": "7"}, {"x-smg-routing-key": "one"}, {"x-session-id": "one"}]
# What an answer may fail with while something is broken.
SAID = {408, 409, 429, 499, 500, 502, 503, 504}


def prompt_of(rng, at):
    words = rng.choice([3, 20, 90, 250])
    return f"{at} " + " ".join(rng.choice(WORDS) for _ in range(words))


def body_of(prompt, tokens=12, **more):
    return {"model": "tiny", "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True, "stream": False} | more


CHAT = "/v1/chat/completions"


def refusal(answer):
    """Whether the client is told that its request is wrong, which in a stream comes after the status."""
    return answer[0] == "status" and 400 <= answer[1] < 500 or answer[0] == "error" and "invalid_request_error" in answer[2]


class Pair:
    """The servers and Baton, as this program sees them."""

    def __init__(self, session, args):
        self.session, self.args = session, args
        self.pool = []

    async def prepare(self, count):
        """Questions and their right answers, by one engine alone."""
        rng = random.Random(self.args.seed)
        gate = asyncio.Semaphore(4)

        async def one(at):
            body = body_of(prompt_of(rng, at), rng.choice([1, 4, 12, 40]), stream=at % 2 == 0)
            async with gate:
                return body, await ask(self.session, self.args.alone, CHAT, body)

        self.pool = await asyncio.gather(*(one(at) for at in range(count)))
        bad = [answer for _, answer in self.pool if answer[0] in FAILURES]
        say(not bad, f"{len(self.pool)} answers of one engine alone {bad[:1] or ''}")

    async def compare(self, body, right):
        """'right', 'failed' with what was said, or 'wrong'."""
        try:
            answer = await asyncio.wait_for(ask(self.session, self.args.baton, CHAT, body), 240)
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            return "failed", repr(error)
        if answer == right:
            return "right", None
        said = answer[0] == "status" and answer[1] in SAID or answer[0] in ("error", "cut")
        return ("failed" if said else "wrong"), answer

    async def overwrite(self):
        """Prompts past Baton, so that the prefill engine puts others into the blocks that it lent before."""
        if self.args.kind != "vllm":
            return

        async def one(at):
            prompt = [5 + (at * 7919 + place * 31) % 1900 for place in range(1500)]
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": False}
            return (await ask(self.session, self.args.prefill, "/v1/completions", body))[0]

        await asyncio.gather(*(one(at) for at in range(16)))

    async def both_live(self):
        for url in (self.args.prefill, self.args.decode):
            try:
                async with self.session.get(url + "/health", timeout=aiohttp.ClientTimeout(total=20)) as page:
                    if page.status != 200:
                        return False
            except (aiohttp.ClientError, asyncio.TimeoutError):
                return False
        return True

    async def ready(self, within):
        until = time.time() + within
        while time.time() < until:
            try:
                async with self.session.get(self.args.baton + "/ready") as page:
                    if page.status == 200 and await self.both_live():
                        return True
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.5)
        return False

    async def equal(self, what, count=24):
        """Both servers live, and answers are right again, those asked before as well as new ones."""
        live = await self.ready(300)
        rng = random.Random(time.time())
        tries = rng.sample(self.pool, min(count, len(self.pool)))
        outcomes = await asyncio.gather(*(self.compare(*one) for one in tries))
        for _ in range(3):
            again = [at for at, (outcome, _) in enumerate(outcomes) if outcome == "failed"]
            for at in again:
                outcomes[at] = await self.compare(*tries[at])
        bad = [(kind, why) for kind, why in outcomes if kind != "right"]
        say(live and not bad, f"{what}: both servers live, {len(outcomes) - len(bad)} of {len(outcomes)} answers are right {bad[:2] or ''}")
        held = await settled(self.session, [self.args.prefill, self.args.decode], self.args.baton, 20)
        say(not held, f"{what}: held afterwards: {held or 'nothing'}")


async def forged(pair):
    """Fields that no client has a say in: the answer is as without them, or the client is told what is wrong."""
    wrong, asked, refused = [], 0, 0
    path_bodies = []
    for name, values in FORGED.items():
        for value in values:
            for tokens in (1, 6):
                path_bodies.append((name, value, tokens))
    gate = asyncio.Semaphore(pair.args.at_once)

    async def one(at, name, value, tokens):
        prompt = prompt_of(random.Random(at), at)
        plain = body_of(prompt, tokens, stream=at % 3 == 0)
        async with gate:
            answer = await ask(pair.session, pair.args.baton, CHAT, plain | {name: value})
            right = await ask(pair.session, pair.args.alone, CHAT, plain)
        return name, value, answer, right

    for start in range(0, len(path_bodies), 32):
        part = [one(start + at, *case) for at, case in enumerate(path_bodies[start:start + 32])]
        for name, value, answer, right in await asyncio.gather(*part):
            asked += 1
            if answer == right:
                continue
            if refusal(answer):
                refused += 1
            else:
                wrong.append((name, value, answer, right[0]))
        if not await pair.both_live():
            wrong.append(("a server is gone after", [c[0] for c in path_bodies[start:start + 32]]))
            break
    for case in wrong[:8]:
        print("  ", repr(case)[:400])
    say(not wrong, f"{asked} requests with forged fields: {refused} refused, {asked - refused - len(wrong)} answered as without them")
    await pair.equal("forged fields")


async def headers(pair):
    body = body_of("the same headers from all", 8)
    right = await ask(pair.session, pair.args.alone, CHAT, body)
    wrong = []

    async def one(given):
        async with pair.session.post(pair.args.baton + CHAT, json=body, headers=given) as answer:
            told = await answer.json()
            text = told["choices"][0]["message"]["content"] if answer.status == 200 else told
            if answer.status != 200 or text.rstrip("\ufffd") != right[0]:
                wrong.append((given, answer.status, text))

    await asyncio.gather(*(one(given) for given in HEADERS for _ in range(8)))
    say(not wrong, f"{8 * len(HEADERS)} requests at once with the same names and ranks in headers {wrong[:2] or ''}")


async def shapes(pair):
    """Identical requests at once, several answers, ends at the first token, prompts at the limit."""
    args, session = pair.args, pair.session
    body = body_of("identical " * 60, 16)
    right = await ask(session, args.alone, CHAT, body)
    answers = await asyncio.gather(*(ask(session, args.baton, CHAT, body | {"stream": at % 2 == 0}) for at in range(24)))
    odd = [answer for answer in answers if answer != right]
    say(not odd, f"24 identical requests at once {(odd[:2], right) if odd else ''}")
    async with session.post(args.baton + CHAT, json=body | {"n": 4, "temperature": 0}) as answer:
        told = await answer.json()
        texts = {choice["message"]["content"].rstrip("\ufffd") for choice in told.get("choices", [])}
        say(answer.status == 200 and texts == {right[0]} and len(told["choices"]) == 4, "n = 4, all of them the greedy answer")
    for at, length in enumerate((1, 8)):
        async with session.post(args.baton + CHAT, json=body_of(f"stop {at}", length, logprobs=True)) as answer:
            first = (await answer.json())["choices"][0]["logprobs"]["content"][0]["token"]
        for more in ({"stop": [first]}, {"stop": [first[:1] or " "]}, {"logit_bias": {"2": 100.0}, "ignore_eos": False},
                     {"logit_bias": {"1": 100.0, "2": 100.0, "0": 100.0}, "ignore_eos": False}, {"max_tokens": 1},
                     {"logit_bias": {"2": 100.0}, "ignore_eos": False, "min_tokens": 3},
                     {"stop_token_ids": list(range(0, 2048)), "ignore_eos": False}):
            plain = body_of(f"stop {at}", length) | more
            ours = await ask(session, args.baton, CHAT, plain)
            alone = await ask(session, args.alone, CHAT, plain)
            # SGLang counts an end by a text otherwise, and keeps what came before it alike.
            same = ours[:2] == alone[:2] if "stop" in more or refusal(alone) else ours == alone
            say(same, f"first token is an end: {repr(more)[:60]} {'' if same else (ours, alone)}")
    for words in (1500, 3000, 3990, 4080, 4090, 5000, 60_000):
        plain = {"model": "tiny", "prompt": [5 + at % 900 for at in range(words)], "max_tokens": 6, "temperature": 0,
                 "ignore_eos": True, "stream": False}
        ours = await ask(session, args.baton, "/v1/completions", plain)
        alone = await ask(session, args.alone, "/v1/completions", plain)
        same = refusal(ours) and refusal(alone) or ours == alone
        say(same, f"a prompt of {words} tokens: {ours[1]} {'' if same else (ours, alone)}")
    await pair.equal("odd shapes")


class Group:
    """A process group that pair.sh started."""

    def __init__(self, run, name):
        self.folder, self.name = pathlib.Path(run), name

    def signal(self, number):
        os.killpg(int((self.folder / f"{self.name}.pid").read_text()), number)

    def start(self):
        with open(self.folder / f"{self.name}.log", "ab") as log:
            started = subprocess.Popen(["bash", self.folder / f"{self.name}.sh"], stdout=log, stderr=log,
                                       stdin=subprocess.DEVNULL, start_new_session=True)
        (self.folder / f"{self.name}.pid").write_text(str(started.pid))


async def under_load(pair, what, break_it):
    """Asks all the time while `break_it` does its worst."""
    over, outcomes = asyncio.Event(), []
    rng = random.Random(what)

    async def client():
        while not over.is_set():
            outcomes.append(await pair.compare(*rng.choice(pair.pool)))
            # One that is refused at once is not asked for ever.
            await asyncio.sleep(0.05 if outcomes[-1][0] == "right" else 0.5)

    clients = [asyncio.create_task(client()) for _ in range(pair.args.at_once)]
    await asyncio.sleep(2)
    await break_it()
    await pair.ready(300)
    await asyncio.sleep(3)
    over.set()
    await asyncio.gather(*clients)
    count = {kind: sum(1 for outcome, _ in outcomes if outcome == kind) for kind in ("right", "failed", "wrong")}
    for kind, why in [one for one in outcomes if one[0] == "wrong"][:3]:
        print(f"   {kind} {why!r}"[:400])
    if pair.args.verbose:
        print("  ", {repr(why)[:160] for kind, why in outcomes if kind == "failed"})
    say(not count["wrong"] and count["right"], f"{what}: {count['right']} right, {count['failed']} told that they failed, {count['wrong']} wrong")
    await pair.equal(what)


def kills(name):
    async def case(pair):
        group = Group(pair.args.run, name)

        async def break_it():
            group.signal(signal.SIGKILL)
            await asyncio.sleep(3)
            group.start()
            # What is dead must be missed before it is asked whether all is well.
            await asyncio.sleep(3)

        await under_load(pair, f"{name} is killed", break_it)
    return case


def stops(name, seconds):
    async def case(pair):
        group = Group(pair.args.run, name)

        async def break_it():
            group.signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(seconds(pair.args))
                if seconds is past_lease and name != "prefill":
                    await pair.overwrite()
            finally:
                group.signal(signal.SIGCONT)

        await under_load(pair, f"{name} stands still for {seconds(pair.args):.0f} s", break_it)
    return case


def short(_):
    return 4.0


def past_lease(args):
    return args.lease + 6.0


CASES = {"forged": forged, "headers": headers, "shapes": shapes}
for who in ("decode", "prefill", "d0", "p0"):
    CASES |= {f"kill-{who}": kills(who), f"stop-{who}": stops(who, short), f"stop-{who}-past-lease": stops(who, past_lease)}


async def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baton", required=True)
    parser.add_argument("--alone", required=True)
    parser.add_argument("--prefill", required=True)
    parser.add_argument("--decode", required=True)
    parser.add_argument("--run", required=True, help="pair.sh's folder, with NAME.pid and NAME.sh")
    parser.add_argument("--kind", default="vllm")
    parser.add_argument("--case", action="append", choices=CASES, help="only these [default: all]")
    parser.add_argument("--lease", type=float, default=30.0, help="how long a prefill engine keeps what it lends, s")
    parser.add_argument("--pool", type=int, default=120)
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    async with clients() as session:
        pair = Pair(session, args)
        await pair.prepare(args.pool)
        for name in args.case or CASES:
            if name not in ("forged", "headers", "shapes"):
                who = name.split("-")[1]
                if not (pathlib.Path(args.run) / f"{who}.pid").exists():
                    print(f"skip  {name}: {who} was not started here")
                    continue
            began = time.time()
            await CASES[name](pair)
            print(f"      {name} took {time.time() - began:.0f} s", flush=True)
    sys.exit(1 if FAILED else 0)


if __name__ == "__main__":
    asyncio.run(main())
