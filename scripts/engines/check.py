#!/usr/bin/env python3
"""Real clients against Baton in front of real engines, compared with one engine alone.

    check.py --baton http://127.0.0.1:8088 --alone http://127.0.0.1:8100 --engine http://127.0.0.1:8200 ...

Sends the same requests both ways and compares the answers token for token; leaves requests at every phase and looks, two
seconds later, whether anything is still held. Prints one line a check; the exit status says whether all held.
"""

import argparse
import asyncio
import json
import random
import sys
import time

import aiohttp

# What `ask` gives in place of a text when there is no whole answer.
FAILURES = ("status", "error", "cut")
WORDS = "the block cache holds a prefix of every prompt that was served before and what is not there is computed".split()
FAILED = []


def say(good, what):
    print(("ok    " if good else "FAILED ") + what, flush=True)
    if not good:
        FAILED.append(what)


def prompts(rng, count):
    """Some share long beginnings, some are alone; from one word to some hundreds."""
    stems = [" ".join(rng.choice(WORDS) for _ in range(rng.choice([40, 120, 300]))) for _ in range(6)]
    for at in range(count):
        tail = " ".join(rng.choice(WORDS) for _ in range(rng.choice([1, 3, 9, 30, 80])))
        yield (rng.choice(stems) + " " + tail if at % 3 else tail) + f" {at}"


def requests(rng, count):
    for at, prompt in enumerate(prompts(rng, count)):
        body = {"model": "tiny", "max_tokens": rng.choice([1, 2, 7, 16, 30]), "temperature": 0}
        if at % 4 == 3:
            body |= {"temperature": 0.8, "seed": at}
        if at % 5 == 4:
            body |= {"ignore_eos": True}
        body["stream"] = at % 2 == 1
        if at % 7 == 6:
            yield "/v1/completions", body | {"prompt": prompt}
        else:
            yield "/v1/chat/completions", body | {"messages": [{"role": "user", "content": prompt}]}


def text_of(choice):
    """The text; vLLM holds back the bytes of a letter that the answer ends within, others show U+FFFD there."""
    part = choice.get("delta") or choice.get("message") or choice
    return part.get("content") or part.get("text") or ""


def whole(text):
    return text.rstrip("\ufffd")


async def ask(session, base, path, body):
    """Text, end and usage of an answer, or what went wrong."""
    body = dict(body)
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    async with session.post(base + path, json=body) as answer:
        if answer.status != 200:
            return ("status", answer.status, await answer.text())
        if not body["stream"]:
            told = await answer.json()
            choice = told["choices"][0]
            return (whole(text_of(choice)), choice["finish_reason"], told["usage"]["completion_tokens"])
        text, end, tokens, done = "", None, None, False
        async for line in answer.content:
            line = line.decode().strip()
            if not line.startswith("data:"):
                continue
            if line == "data: [DONE]":
                done = True
                break
            told = json.loads(line[5:])
            if "error" in told:
                return ("error", 200, line)
            if told.get("usage"):
                tokens = told["usage"]["completion_tokens"]
            for choice in told["choices"]:
                text += text_of(choice)
                end = choice.get("finish_reason") or end
        return (whole(text), end, tokens) if done else ("cut", 200, text)


async def compare(session, args):
    rng = random.Random(args.seed)
    gate = asyncio.Semaphore(args.at_once)

    async def one(path, body):
        async with gate:
            ours = await ask(session, args.baton, path, body)
            alone = await ask(session, args.alone, path, body)
            return ours == alone, path, body, ours, alone

    began = time.time()
    asked = list(requests(rng, args.count))
    later = [one for one in asked if args.kind in ONE_BY_ONE and "seed" in one[1]]
    outcomes = await asyncio.gather(*(one(*request) for request in asked if request not in later))
    for ask_later in later:
        tries = [await one(*ask_later)]
        while not tries[-1][0] and len(tries) < 4:
            tries.append(await one(*ask_later))
        outcomes.append(tries[-1])
    told, wrong = 0, []
    for outcome in outcomes:
        # One that is told that it failed may be sent again, and is; a wrong answer is wrong for good.
        for _ in range(3):
            if outcome[0] or outcome[3][0] not in FAILURES:
                break
            told += 1
            outcome = await one(*outcome[1:3])
        if not outcome[0]:
            wrong.append(outcome)
    for _, path, body, ours, alone in wrong[:3]:
        print(f"   {path} {json.dumps(body)[:160]}\n   baton {ours!r}\n   alone {alone!r}")
    say(not wrong, f"{len(outcomes) - len(wrong)} of {len(outcomes)} answers equal one engine's alone; told that they failed, and asked again: {told}"
        f" ({time.time() - began:.0f} s)")


async def scrape(session, base, names):
    async with session.get(base + "/metrics") as page:
        text = await page.text()
    found = {}
    for line in text.splitlines():
        for name in names:
            if line.startswith(name + "{") or line.startswith(name + " "):
                found[name] = found.get(name, 0) + float(line.split()[-1])
    return found


HELD = ["vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
        "sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:num_used_tokens", "sglang:num_prefill_bootstrap_queue_reqs",
        "sglang:num_prefill_inflight_queue_reqs", "sglang:num_decode_prealloc_queue_reqs", "sglang:num_decode_transfer_queue_reqs"]
# Engines whose seeded draws depend on what else is in the same pass, be it a health check: those requests are compared one after
# another, and again where they differ. That 30 tokens are equal by chance is out of the question.
ONE_BY_ONE = {"sglang"}
# A field that only the engine knows, and a value of it that the engine refuses.
FIELDS = {"vllm": ("allowed_token_ids", [40, 41], "none"), "sglang": ("regex", "[ab]{6}", "(")}


async def held_now(session, engines, baton):
    """What the engines and Baton hold for requests, by their own metrics."""
    held = {}
    for engine in engines:
        found = await scrape(session, engine, HELD)
        held |= {f"{engine} {name}": value for name, value in found.items() if value}
    live = (await scrape(session, baton, ["baton_requests_live"])).get("baton_requests_live", 0)
    return held | ({"baton_requests_live": live} if live else {})


async def settled(session, engines, baton, within):
    """What is still held after so many seconds; nothing as soon as nothing is."""
    until = time.time() + within
    while held := await held_now(session, engines, baton):
        if time.time() > until:
            break
        await asyncio.sleep(0.2)
    return held


async def leave(session, args):
    """Clients that go away at any moment: nothing may be held two seconds later."""
    rng = random.Random(args.seed + 1)

    async def one(at, path, body):
        body = body | {"max_tokens": 200, "ignore_eos": True, "stream": at % 2 == 0, "temperature": 0}
        try:
            await asyncio.wait_for(ask(session, args.baton, path, body), rng.uniform(0.0, args.leave_within))
        except (asyncio.TimeoutError, aiohttp.ClientError):
            pass

    bodies = list(requests(rng, args.leaves))
    for start in range(0, len(bodies), args.at_once):
        await asyncio.gather(*(one(start + at, *b) for at, b in enumerate(bodies[start:start + args.at_once])))
    held = await settled(session, args.engine, args.baton, 2.0)
    say(not held, f"{len(bodies)} clients left at any moment; held two seconds later: {held or 'nothing'}")


async def fields(session, args):
    """Fields that Baton does not know reach the engine; what cannot be served is refused as one engine refuses it."""
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "the block"}], "max_tokens": 4, "temperature": 0,
            "stream": False}
    name, value, wrong = FIELDS[args.kind]
    answer = await ask(session, args.baton, "/v1/chat/completions", chat | {name: value})
    alone = await ask(session, args.alone, "/v1/chat/completions", chat | {name: value})
    say(answer == alone, f"a field that only the engine knows changes the answer alike: {answer[0]!r} {alone[0]!r}")
    answer = await ask(session, args.baton, "/v1/chat/completions", chat | {"max_tokens": 1_000_000})
    say(answer[0] == "status" and answer[1] == 400, f"more tokens than the model has are refused: {answer[1]}")
    answer = await ask(session, args.baton, "/v1/chat/completions", chat | {name: wrong})
    say(answer[0] == "status" and 400 <= answer[1] < 500, f"a field that the engine refuses is the client's error: {answer[1:]}")


async def caches(session, args):
    """What the conductor expects to find in a prefill engine's cache, beside what that engine says it found."""
    rng = random.Random(args.seed + 2)
    right, total, reused, odd = 0, 0, 0, []
    for at in range(args.caches):
        stem = f"{at} " + " ".join(rng.choice(WORDS) for _ in range(rng.choice([60, 150, 300])))
        for turn in range(3):
            stem += " " + " ".join(rng.choice(WORDS) for _ in range(rng.choice([5, 40, 90])))
            name = f"cache-{args.seed}-{at}-{turn}"
            body = {"model": "tiny", "max_tokens": 2, "temperature": 0, "ignore_eos": True, "messages": [{"role": "user", "content": stem}]}
            async with session.post(args.baton + "/v1/chat/completions", json=body, headers={"x-request-id": name}) as answer:
                told = await answer.json()
            found = told["usage"]["prompt_tokens_details"]["cached_tokens"]
            async with session.get(f"{args.baton}/admin/explain/{name}") as page:
                decision = (await page.json())["decisions"][0]
            expected = next(c["cached_tokens"] for c in decision["candidates"] if c["chosen"])
            right, total, reused = right + (found == expected), total + 1, reused + found
            if found != expected:
                odd.append((name, told["usage"]["prompt_tokens"], expected, found))
            # The engine's announcements are on their way.
            await asyncio.sleep(0.3)
    for name, prompt, expected, found in odd[:5]:
        print(f"   {name}: of {prompt} tokens {expected} expected in the cache, {found} found")
    say(right >= 0.99 * total and reused > 0, f"{right} of {total} expectations of the cache were exact; {reused} tokens were reused")


def clients():
    """Clients with a connection for each request: a kept one may be closed by the server as it is used again."""
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300), connector=aiohttp.TCPConnector(limit=0, force_close=True))


async def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baton", required=True, help="Baton's front door")
    parser.add_argument("--alone", required=True, help="one engine that serves whole requests, to compare with")
    parser.add_argument("--engine", action="append", default=[], help="an engine behind Baton, for its metrics")
    parser.add_argument("--kind", choices=FIELDS, default="vllm", help="what the engines are")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--leaves", type=int, default=60)
    parser.add_argument("--caches", type=int, default=15, help="conversations whose cached tokens are compared")
    parser.add_argument("--leave-within", type=float, default=1.5, help="seconds after which a leaving client is gone")
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    async with clients() as session:
        await fields(session, args)
        await caches(session, args)
        await compare(session, args)
        await leave(session, args)
    sys.exit(1 if FAILED else 0)


if __name__ == "__main__":
    asyncio.run(main())
