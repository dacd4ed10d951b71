#!/usr/bin/env python3
"""Checks a running front door with the `openai` Python package.

    python tests/clients/openai_client.py http://127.0.0.1:8080/v1 [model]

Works against any front door; what only the echo of `cargo run -p baton-router --example door` can show
(texts, faults on demand, refusals that end) is checked when the model is called `echo`. Prints a line for
each check; exits with 1 if one failed.
"""

import asyncio
import json
import sys
import time
import urllib.error
import urllib.request

import openai

BASE = sys.argv[1].rstrip("/") if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1"
client = openai.OpenAI(base_url=BASE, api_key="none", max_retries=0, timeout=60)
MODEL = sys.argv[2] if len(sys.argv) > 2 else client.models.list().data[0].id
ECHO = MODEL == "echo"
CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


def only_echo(function):
    return check(function) if ECHO else function


def ask(text="hello wörld 😀", **more):
    more.setdefault("max_tokens", 64)
    return dict(model=MODEL, messages=[{"role": "user", "content": text}], **more)


def fetch(url, body=None, kind=None):
    """Status and JSON of a bare request, whatever the status."""
    request = urllib.request.Request(url, data=body, headers={"content-type": kind} if kind else {})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@check
def models_are_listed_and_retrieved():
    names = [model.id for model in client.models.list()]
    assert MODEL in names, names
    assert client.models.retrieve(MODEL).object == "model"


@check
def a_chat_is_answered():
    answer = client.chat.completions.create(**ask(max_tokens=8))
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert 1 <= answer.usage.completion_tokens <= 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


@only_echo
def the_echo_is_exact():
    answer = client.chat.completions.create(**ask())
    assert answer.choices[0].message.content == "hello wörld 😀", answer


@check
def a_stream_is_the_whole_answer():
    whole = client.chat.completions.create(**ask(temperature=0, seed=1)).choices[0].message.content
    text, ends, roles, usage = "", [], 0, None
    options = {"include_usage": True}
    for chunk in client.chat.completions.create(**ask(temperature=0, seed=1, stream=True, stream_options=options)):
        if chunk.usage is not None:
            usage = chunk.usage
            assert chunk.choices == []
        for choice in chunk.choices:
            text += choice.delta.content or ""
            roles += choice.delta.role == "assistant"
            ends += [choice.finish_reason] if choice.finish_reason else []
    assert text == whole, (text, whole)
    assert (roles, len(ends)) == (1, 1), (roles, ends)
    assert usage.completion_tokens > 0


@check
def the_sdks_own_accumulator_agrees():
    with client.chat.completions.stream(**ask(temperature=0, seed=1)) as stream:
        try:
            for _ in stream:
                pass
            final = stream.get_final_completion()
        except openai.LengthFinishReasonError as cut:
            final = cut.completion
    whole = client.chat.completions.create(**ask(temperature=0, seed=1))
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason


@check
def several_answers_come_under_their_index():
    answer = client.chat.completions.create(**ask(n=3, seed=3, max_tokens=4))
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**ask(n=3, seed=3, max_tokens=4, stream=True)):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in answer.choices], texts


@check
def logprobs_cover_the_answer():
    answer = client.chat.completions.create(**ask(max_tokens=5, logprobs=True, top_logprobs=3))
    content = answer.choices[0].logprobs.content
    assert 1 <= len(content) <= 5
    for entry in content:
        assert entry.logprob <= 0 and 1 <= len(entry.top_logprobs) <= 3
        assert all(0 <= byte < 256 for byte in entry.bytes)


@only_echo
def stop_strings_end_answers():
    answer = client.chat.completions.create(**ask("one two three", stop=["wo t", "xyz"]))
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("one t", "stop"), answer
    text = "".join(
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(**ask("one two three", stop="wo t", stream=True))
    )
    assert text == "one t", text


@check
def tools_are_taken():
    tool = {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
    answer = client.chat.completions.create(**ask(tools=[tool], tool_choice="auto", max_tokens=4))
    assert answer.choices[0].message.role == "assistant"
    history = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"Ulm\"}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    client.chat.completions.create(model=MODEL, messages=history, tools=[tool], max_tokens=4)


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALLS = [
    '<tool_call>{"name": "weather", "arguments": {"city": "Ulm é"}}</tool_call>',
    '<tool_call>{"arguments": {}, "name": "weather"}</tool_call>',
]


@only_echo
def calls_are_read():
    asked = ask("Let me look. " + " ".join(CALLS), tools=[WEATHER], max_tokens=400)
    choice = client.chat.completions.create(**asked).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me look."), choice
    calls = [(call.type, call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    assert calls == [("function", "weather", {"city": "Ulm é"}), ("function", "weather", {})], calls
    assert len({call.id for call in choice.message.tool_calls}) == 2
    # The next turn takes the message as it came.
    history = [*asked["messages"], choice.message, {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "sunny"}]
    client.chat.completions.create(**{**asked, "messages": history})
    one = client.chat.completions.create(**asked, parallel_tool_calls=False).choices[0].message
    assert len(one.tool_calls) == 1, one


@only_echo
def calls_are_streamed():
    asked = ask("Let me look. " + " ".join(CALLS), tools=[WEATHER], max_tokens=400)
    pieces = 0
    with client.chat.completions.stream(**asked) as stream:
        for event in stream:
            pieces += event.type == "tool_calls.function.arguments.delta" and event.index == 0
        final = stream.get_final_completion().choices[0]
    whole = client.chat.completions.create(**asked).choices[0]
    told = lambda choice: [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
    assert told(final) == told(whole) and len(told(whole)) == 2, final
    assert (final.finish_reason, final.message.content) == ("tool_calls", "Let me look."), final
    assert pieces > 5, pieces


@check
def content_may_come_in_parts():
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "there"}]
    client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": parts}], max_tokens=4)
    image = [{"type": "image_url", "image_url": {"url": "data:,x"}}]
    raises(openai.BadRequestError, None, messages=[{"role": "user", "content": image}], model=MODEL)


@check
def completions_take_text_tokens_and_batches():
    for prompt in ("ab", ["ab", "cd"], [97, 98], [[97, 98], [99]]):
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=3)
        batch = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
        assert len(answer.choices) == batch, answer
    answer = client.completions.create(model=MODEL, prompt="ab", max_tokens=3, echo=True, logprobs=2)
    logs = answer.choices[0].logprobs
    assert answer.choices[0].text.startswith("ab")
    assert len(logs.tokens) == len(logs.token_logprobs) == len(logs.top_logprobs) == len(logs.text_offset)
    text = "".join(chunk.choices[0].text for chunk in client.completions.create(
        model=MODEL, prompt="ab", max_tokens=3, temperature=0, seed=1, stream=True))
    assert text == client.completions.create(model=MODEL, prompt="ab", max_tokens=3, temperature=0, seed=1).choices[0].text


def raises(kind, code, **request):
    try:
        client.chat.completions.create(**request)
    except kind as error:
        assert isinstance(error.body, dict) and error.body["message"], error.body
        assert code is None or error.code == code, (error.code, code)
        assert error.request_id, "x-request-id"
        return error
    raise AssertionError(f"no {kind.__name__}")


@check
def mistakes_raise_the_sdks_errors():
    raises(openai.NotFoundError, "model_not_found", **{**ask(), "model": "nobody"})
    raises(openai.BadRequestError, None, **ask(temperature=3))
    raises(openai.BadRequestError, "context_length_exceeded", **ask(max_tokens=2_000_000_000))
    raises(openai.BadRequestError, None, model=MODEL, messages=[])
    try:
        client.embeddings.create(model=MODEL, input="x")
    except openai.APIStatusError as error:
        assert error.status_code in (404, 501), error
    else:
        raise AssertionError("embeddings were served")


@check
def every_error_is_json():
    root = BASE.removesuffix("/v1")
    for path, body, kind in (
        (f"{root}/nothing", None, None),
        (f"{BASE}/chat/completions", None, None),
        (f"{BASE}/chat/completions", b"{", "application/json"),
        (f"{BASE}/chat/completions", b"{}", "text/plain"),
    ):
        status, answer = fetch(path, body, kind)
        assert 400 <= status < 500
        assert set(answer["error"]) == {"message", "type", "param", "code"}, answer
    assert fetch(f"{root}/health")[0] == 200
    assert fetch(f"{root}/ready")[1]["ready"] is True


@only_echo
def faults_in_a_stream_raise():
    try:
        for _ in client.chat.completions.create(**ask("please fail now", stream=True)):
            pass
    except openai.APIError as error:
        assert error.code == "decode_lost", error
    else:
        raise AssertionError("the stream ended well")
    raises(openai.InternalServerError, "decode_lost", **ask("please fail now"))


@only_echo
def retries_obey_retry_after():
    patient = client.with_options(max_retries=2)
    begun = time.monotonic()
    text = f"refuse:1 {begun}"
    answer = patient.chat.completions.create(**ask(text))
    waited = time.monotonic() - begun
    assert answer.choices[0].message.content == text
    assert 1.0 <= waited < 4, waited
    error = raises(openai.RateLimitError, "ttft", **ask(f"refuse:9 {begun}"))
    assert error.response.headers["retry-after"] == "2" and error.response.headers["x-should-retry"] == "true"


@only_echo
def timeouts_are_the_clients():
    begun = time.monotonic()
    try:
        client.with_options(timeout=0.7).chat.completions.create(**ask("slow and long answer"))
    except (openai.APITimeoutError, openai.InternalServerError):
        assert time.monotonic() - begun < 3
    else:
        raise AssertionError("no time-out")


@check
def the_async_client_works():
    async def both():
        async with openai.AsyncOpenAI(base_url=BASE, api_key="none", max_retries=0) as many:
            whole = await many.chat.completions.create(**ask(temperature=0, seed=1))
            text = ""
            async for chunk in await many.chat.completions.create(**ask(temperature=0, seed=1, stream=True)):
                text += chunk.choices[0].delta.content or ""
            assert text == whole.choices[0].message.content
            answers = await asyncio.gather(*(many.chat.completions.create(**ask(f"{n}", max_tokens=4)) for n in range(32)))
            assert all(answer.choices for answer in answers)

    asyncio.run(both())


@check
def raw_responses_have_a_request_id():
    raw = client.chat.completions.with_raw_response.create(**ask(max_tokens=2), extra_headers={"x-request-id": "mine-7"})
    assert raw.headers["x-request-id"] == "mine-7"


def main():
    failed = 0
    for function in CHECKS:
        name = function.__name__.replace("_", " ")
        try:
            function()
            print(f"ok    {name}")
        except Exception as error:  # a check that fails must not hide the others
            failed += 1
            print(f"FAIL  {name}: {type(error).__name__}: {error}")
    print(f"{len(CHECKS) - failed} of {len(CHECKS)} checks passed: openai {openai.__version__}, {BASE}, model {MODEL}")
    sys.exit(1 if failed else 0)


main()
