#!/usr/bin/env python3
"""Records chats and the texts that they are as prompts: 500 from a seed, rendered by transformers (pip install transformers jinja2; no torch)
after what vLLM 0.32 does to messages before. Writes src/router/tests/chats/{templates/*.jinja,chats.jsonl}; the templates are our own.

    record.py [FOLDER]
"""
import copy
import json
import pathlib
import random
import sys

from transformers.utils.chat_template_utils import render_jinja_template

COUNT, SEED = 500, 20261122

TEMPLATES = {
    # Marks around each message, tools first, calls and their answers in tags.
    "marks": """{%- if tools %}
<|im_start|>system
{%- if messages[0].role == 'system' %}
{{ messages[0].content }}
{% endif %}
Functions:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
<|im_end|>
{% elif messages[0].role == 'system' %}
<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% elif message.role == 'assistant' %}
<|im_start|>assistant
{%- if message.reasoning_content %}
<think>{{ message.reasoning_content.strip() }}</think>
{%- endif %}
{{ '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role == 'tool' %}
<|im_start|>user
<tool_response id={{ message.tool_call_id }}>{{ message.content }}</tool_response><|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{%- endif %}""",
    # Headers; contents trimmed, the first system message taken out.
    "headers": """{{- '<|begin_of_text|>' }}
{%- if messages[0]['role'] == 'system' %}
{%- set system = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + system + '<|eot_id|>' }}
{%- if tools is not none %}{{- tools | tojson(indent=2) }}{%- endif %}
{%- for message in messages %}
{%- if message.tool_calls %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- for call in message.tool_calls %}{{- call.function.name + ' ' + call.function.arguments | tojson }}{%- endfor %}
{{- '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message['role'] + (' ' + message.name if message.name is defined else '') + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- for document in documents or [] %}{{- document.title + ': ' + document.text }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}""",
    # Goes through contents part by part, and knows developers.
    "parts": """{%- for message in messages %}
[{{ message.role }}{% if message.role == 'developer' and message.tools %} {{ message.tools | length }} tools{% endif %}]
{%- if message.content is string %} {{ message.content }}
{%- else %}{%- for part in message.content %}{% if part.type == 'text' %}({{ part.text }}){% endif %}{%- endfor %}{%- endif %}
{%- for call in message.tool_calls or [] %} !{{ call.function.name }}{{ call.function.arguments | tojson }}{%- endfor %}
[end]
{%- endfor %}
{%- if add_generation_prompt %}[assistant]{% if reasoning_effort is defined %}{{ reasoning_effort }}{% endif %}{%- endif %}""",
}
WORDS = "block cache prefill decode Ulm straße naïve 你好 🙂 don't {x} \"q\" 3.14 a\nb".split(" ")


def text(rng):
    """A few words, perhaps with spaces around them."""
    words = " ".join(rng.choices(WORDS, k=rng.randint(1, 3)))
    return rng.choice(["", "", "", " ", "\n"]) + words + rng.choice(["", "", "", " ", "\n\n"])


def content(rng):
    """A string, or parts of text."""
    if rng.random() < 0.7:
        return text(rng)
    return [{"type": rng.choice(["text", "text", "input_text"]), "text": text(rng)} for _ in range(rng.randint(1, 3))]


def call(rng, at):
    """A call of a function, in one of the shapes in which clients send them back."""
    arguments = rng.choice(['{"zone": "UTC"}', '{"n": [1, 2.5, null], "é": "ü"}', "", "not json", "[1]", None, {"a": True}])
    return {"id": f"call_{at}", "type": "function", "function": {"name": rng.choice(["now", "add"]), "arguments": arguments}}


def chat(rng):
    """A request: messages, and what else shapes a prompt."""
    messages = []
    if rng.random() < 0.5:
        messages.append({"role": rng.choice(["system", "developer"]), "content": content(rng)})
    for turn in range(rng.randint(1, 3)):
        user = {"role": "user", "content": content(rng)}
        if rng.random() < 0.2:
            user["name"] = "ann"
        messages.append(user)
        kind = rng.random()
        if kind < 0.3:
            calls = [call(rng, f"{turn}{at}") for at in range(rng.randint(1, 2))]
            answer = {"role": "assistant", "tool_calls": calls}
            if rng.random() < 0.6:
                answer["content"] = rng.choice([None, "", text(rng)])
            messages.append(answer)
            messages += [{"role": "tool", "tool_call_id": one["id"], "content": content(rng)} for one in calls]
        elif kind < 0.7:
            answer = {"role": "assistant", "content": content(rng), **rng.choice([{}, {"tool_calls": []}, {"refusal": None}])}
            if rng.random() < 0.3:
                answer[rng.choice(["reasoning", "reasoning_content"])] = text(rng)
            messages.append(answer)
        if rng.random() < 0.1:
            messages.append({"role": rng.choice(["system", "developer"]), "content": content(rng)})
    body = {"messages": messages}
    if rng.random() < 0.3:
        parameters = {"type": "object", "properties": {"zone": {"type": "string"}}}
        body["tools"] = [{"type": "function", "function": {"name": "now", "description": "Tells the time", "parameters": parameters}}]
    if rng.random() < 0.15:
        body["documents"] = [{"title": "One", "text": text(rng)}]
    if rng.random() < 0.15:
        body["reasoning_effort"] = rng.choice(["low", "none"])
    if messages[-1]["role"] == "assistant" and messages[-1].get("content") and rng.random() < 0.7:
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    elif rng.random() < 0.1:
        body["add_generation_prompt"] = False
    return body


def prepared(messages, by_parts, developer):
    """What vLLM 0.32 makes of messages before a template gets them."""
    made = []
    for given in copy.deepcopy(messages):
        role, said = given["role"], given.get("content")
        parts = [] if said is None else [said] if isinstance(said, str) else [part["text"] for part in said]
        one = {"role": role, "content": [{"type": "text", "text": part} for part in parts] if by_parts and role != "tool" else "\n".join(parts)}
        if role == "assistant":
            reasoning = given.get("reasoning") if given.get("reasoning") is not None else given.get("reasoning_content")
            if reasoning is not None:
                one |= {"reasoning": reasoning, "reasoning_content": reasoning}
            for called in given.get("tool_calls") or []:
                arguments = called["function"].get("arguments")
                if isinstance(arguments, str):
                    try:
                        arguments = json.loads(arguments)
                    except ValueError:
                        arguments = {}
                called["function"]["arguments"] = arguments if isinstance(arguments, dict) else {}
                one.setdefault("tool_calls", []).append(called)
        if role == "tool":
            one["tool_call_id"] = given["tool_call_id"]
        if role == "developer":
            one["tools"] = given.get("tools")
        if isinstance(given.get("name"), str):
            one["name"] = given["name"]
        made.append(one)
    if developer or all(one["role"] != "developer" for one in made):
        return made
    for one in made:
        if one["role"] == "developer":
            one["role"] = "system"
            one.pop("tools")
    system = [at for at, one in enumerate(made) if one["role"] == "system"]
    if system == [0]:
        return made
    plain = [made[at]["content"] for at in system]
    plain = ["\n".join(part["text"] for part in said) if isinstance(said, list) else said for said in plain]
    merged = {"role": "system", "content": "\n\n".join(said for said in plain if said)}
    return [merged, *[one for one in made if one["role"] != "system"]]


def rendered(name, body):
    """The prompt's text; `None` where the template refuses the chat."""
    source = TEMPLATES[name]
    messages = prepared(body["messages"], name == "parts", name == "parts")
    more = {"add_generation_prompt": body.get("add_generation_prompt", True), "continue_final_message": body.get("continue_final_message", False)}
    if "reasoning_effort" in body:
        more |= {"reasoning_effort": body["reasoning_effort"], "enable_thinking": body["reasoning_effort"] != "none"}
    texts, _ = render_jinja_template(
        conversations=[messages], tools=body.get("tools"), documents=body.get("documents"), chat_template=source, bos_token="<s>", eos_token="</s>", **more)
    return texts[0]


def main():
    """Writes the templates and the chats."""
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "src/router/tests/chats")
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in TEMPLATES.items():
        (folder / f"{name}.jinja").write_text(source, encoding="utf-8")
    rng = random.Random(SEED)
    lines = []
    while len(lines) < COUNT:
        name, body = rng.choice(list(TEMPLATES)), chat(rng)
        try:
            prompt = rendered(name, body)
        except ValueError:
            # The template does not show the message that is to go on.
            prompt = None
        lines.append(json.dumps({"template": name, "body": body, "prompt": prompt}, ensure_ascii=False, separators=(",", ":")))
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
