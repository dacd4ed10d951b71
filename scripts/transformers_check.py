#!/usr/bin/env python3
"""Checks the built-in engine against Hugging Face transformers.

    transformers_check.py FOLDER [--fixture FILE] [--engine PROGRAM] [--large]

Makes three small Llama checkpoints under FOLDER, has transformers compute logits and greedy
continuations (32-bit, on the CPU), and prints a digest of them. `--fixture` writes the digest to the
file that `src/engine/tests/it/transformers.rs` compares with; `--engine` runs the engine's example
`logits` over the same folders; `--large` does all this with one larger checkpoint instead.

The table: the largest logit; by how much the likeliest token of the continuation led at least; and the
largest difference of all logits from those of transformers' default attention, relative to the largest
logit: of transformers' own eager attention, of the engine, and of the engine when transformers is
given rotary frequencies that were computed in 64 bits, as the engine's are.

It needs torch, transformers and safetensors; `docs/engine.md` says which versions were used.

Every weight follows from a formula in whole numbers and correctly rounded 64-bit operations, so that
the Rust test computes the same bits and no weights need to be kept.
"""

import argparse
import json
import os
import re
import subprocess
from functools import partial
from pathlib import Path

os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

ANSWER_TOKENS = 32
KEPT_LOGITS = 16
MASK = (1 << 64) - 1

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}

# Name, type of the weights on disk, what differs from `config`, lengths of the prompts.
CASES = [
    ("grouped", torch.float32, {"rope": PLAIN}, [1, 7, 48, 160]),
    (
        "tied-llama3-bf16",
        torch.bfloat16,
        {"rope": LLAMA3, "tie_word_embeddings": True, "head_dim": 20, "num_key_value_heads": 1},
        [1, 9, 100, 200],
    ),
    (
        "linear",
        torch.float32,
        {"rope": LINEAR, "num_hidden_layers": 2, "num_key_value_heads": 4, "intermediate_size": 600},
        [3, 33, 180],
    ),
]

# Shows whether differences grow with width, depth and length; too large for the fixture.
LARGE = (
    "large",
    torch.bfloat16,
    {
        "rope": {**LLAMA3, "original_max_position_embeddings": 512},
        "vocab_size": 4096,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_hidden_layers": 8,
        "intermediate_size": 1408,
        "max_position_embeddings": 4096,
    },
    [16, 2000],
)


def fnv(data):
    """FNV-1a of some bytes, 64 bits."""
    digest = 0xCBF29CE484222325
    for byte in data:
        digest = ((digest ^ byte) * 0x100000001B3) & MASK
    return digest


def draws(name, count):
    """The first draws of the stream with this name: splitmix64 from the name's FNV-1a."""
    with np.errstate(over="ignore"):
        steps = np.arange(1, count + 1, dtype=np.uint64)
        z = np.uint64(fnv(name.encode())) + steps * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def weights(case, name, shape):
    """A tensor: 24 bits of each draw as a number between -1 and 1, times a spread; norms lie about 1."""
    count = int(np.prod(shape))
    units = (draws(f"{case}/{name}", count) >> np.uint64(40)).astype(np.float64) / 8388608.0 - 1.0
    if len(shape) == 1:
        numbers = 1.0 + 0.25 * units
    elif "embed_tokens" in name:
        numbers = 0.125 * units
    else:
        # Uniform numbers of this spread keep a mean square of 1 from inputs to outputs.
        numbers = units * np.sqrt(3.0 / shape[1])
    return torch.from_numpy(numbers.astype(np.float32).reshape(shape))


def config_of(changes):
    """A small shape with what a case changes in it, under whichever name this version of transformers
    has for the rotary settings."""
    rope = dict(changes["rope"])
    settings = {
        "vocab_size": 320,
        "hidden_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "intermediate_size": 200,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "eos_token_id": None,
        "bos_token_id": None,
        **{key: value for key, value in changes.items() if key != "rope"},
    }
    if int(transformers.__version__.split(".")[0]) >= 5:
        return LlamaConfig(**settings, rope_parameters=rope)
    theta = rope.pop("rope_theta")
    scaling = None if rope["rope_type"] == "default" else rope
    return LlamaConfig(**settings, rope_theta=theta, rope_scaling=scaling)


def make(folder, case, dtype, changes):
    """Writes a checkpoint folder as transformers writes it, the last case in several files."""
    config = config_of(changes)
    config.dtype = dtype
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights(case, name, tuple(parameter.shape)))
    size = "250KB" if case == "linear" else "1GB"
    model.to(dtype).save_pretrained(folder, max_shard_size=size)


def digest(model, dtype):
    """FNV-1a over the weights as stored, by name: tells other weights from other arithmetic."""
    stored = b""
    for _, parameter in sorted(model.named_parameters()):
        bits = parameter.detach().to(dtype).contiguous()
        stored += bits.view(torch.int16 if dtype == torch.bfloat16 else torch.int32).numpy().tobytes()
    return f"{fnv(stored):016x}"


def answer(model, tokens):
    """A greedy continuation, and by how much its likeliest tokens ever led at least."""
    out = model.generate(
        torch.tensor([tokens]),
        attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
        max_new_tokens=ANSWER_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=0,
    )
    top = [torch.topk(logits[0].double(), 2).values for logits in out.logits]
    lead = min(float(two[0] - two[1]) for two in top)
    return out.sequences[0, len(tokens) :].tolist(), lead


def off(got, want):
    """The largest difference of two rows of logits, relative to the largest logit."""
    got, want = np.asarray(got, dtype=np.float64), np.asarray(want, dtype=np.float64)
    return float(np.abs(got - want).max() / np.abs(want).max())


def frequencies(rope, head_dim):
    """The rotary frequencies in 64 bits, rounded once; transformers computes them in 32 bits."""
    plain = rope["rope_theta"] ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    keep = 1.0
    if rope["rope_type"] == "llama3":
        waves = rope["original_max_position_embeddings"] * plain / (2 * np.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        keep = np.clip((waves - low) / (high - low), 0.0, 1.0)
    elif rope["rope_type"] == "linear":
        keep = 0.0
    return torch.from_numpy(plain * (keep + (1.0 - keep) / rope.get("factor", 1.0))).float()


def engine_logits(program, folder, tokens):
    """What the engine's example `logits` prints."""
    done = subprocess.run(
        [program, str(folder), *map(str, tokens)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{program} {folder}: {done.stderr.strip()}")
    return json.loads(done.stdout)


@torch.no_grad()
def check(folder, case, options):
    """Runs one case; gives its part of the digest."""
    name, dtype, changes, lengths = case
    make(folder, name, dtype, changes)
    load = partial(LlamaForCausalLM.from_pretrained, folder, dtype=torch.float32)
    model, eager, exact = load().eval(), load(attn_implementation="eager").eval(), load().eval()
    exact.model.rotary_emb.inv_freq.copy_(frequencies(changes["rope"], model.config.head_dim))
    vocab = model.config.vocab_size
    texts = []
    for length in lengths:
        tokens = (draws(f"{name}/prompt {length}", length) % np.uint64(vocab)).tolist()
        logits = model(torch.tensor([tokens])).logits[0, -1]
        continuation, lead = answer(model, tokens)
        kept = [float(f"{x:.7g}") for x in logits[:: vocab // KEPT_LOGITS].tolist()]
        texts.append({"tokens": tokens, "logits": kept, "answer": continuation})
        row = f"| {name} | {length} | {float(logits.abs().max()):.2f} | {lead:.1e} |"
        row += f" {off(eager(torch.tensor([tokens])).logits[0, -1], logits):.1e} |"
        if options.engine:
            ours = engine_logits(options.engine, folder, tokens)
            row += f" {off(ours, logits):.1e} | {off(ours, exact(torch.tensor([tokens])).logits[0, -1]):.1e} |"
        print(row)
    dtype_name = {torch.float32: "F32", torch.bfloat16: "BF16"}[dtype]
    config = json.loads((folder / "config.json").read_text())
    stored = {"dtype": dtype_name, "weights": digest(model, dtype) if options.fixture else None}
    return {"name": name, **stored, "config": config, "texts": texts}


def one_line_lists(text):
    """Indented JSON with each list of plain values on a line of its own."""
    return re.sub(r"\[[^\[\]{}]*\]", lambda found: json.dumps(json.loads(found.group())), text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the checkpoints are written")
    parser.add_argument("--fixture", type=Path, help="write the digest here")
    parser.add_argument("--engine", help="the engine's example `logits`, built")
    parser.add_argument("--large", action="store_true", help="only the large checkpoint, without fixture")
    options = parser.parse_args()
    if options.large and options.fixture:
        parser.error("--large is not for the fixture")
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    columns = ["checkpoint", "prompt tokens", "largest logit", "least lead", "eager"]
    columns += ["engine", "engine, exact frequencies"] if options.engine else []
    print("|", " | ".join(columns), "|")
    print("|---" * len(columns) + "|")
    cases = [check(options.folder / case[0], case, options) for case in ([LARGE] if options.large else CASES)]
    for case in cases:
        for text in case["texts"]:
            print(case["name"], len(text["tokens"]), "logits", [f"{x:.6g}" for x in text["logits"]])
            print(case["name"], len(text["tokens"]), "answer", text["answer"])
    if options.fixture:
        made = {"transformers": transformers.__version__, "torch": torch.__version__, "cases": cases}
        options.fixture.write_text(one_line_lists(json.dumps(made, indent=1)) + "\n")


if __name__ == "__main__":
    main()
