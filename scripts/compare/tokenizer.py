#!/usr/bin/env python3
"""Makes the folder of a model that has a tokenizer alone: a byte-level BPE of 32,000 tokens, learnt from the texts of this
repository. Measurements with it stand for a trained tokenizer; the built-in one has a token for each byte.

Usage: python3 scripts/compare/tokenizer.py FOLDER    (needs the package `tokenizers` from PyPI)
"""

import json
import subprocess
import sys
from pathlib import Path

TOKENS = 32_000
KINDS = (".rs", ".md", ".py", ".toml", ".sh", ".proto")
# As GPT-4 and Llama 3 cut text into words.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MARKS = ["<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>"]
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        sys.exit("the package `tokenizers` is not there; pip install tokenizers")
    root = Path(__file__).resolve().parents[2]
    listed = subprocess.run(["git", "-C", root, "ls-files"], capture_output=True, text=True, check=True)
    files = sorted(name for name in listed.stdout.split("\n") if name.endswith(KINDS))
    texts = [(root / name).read_text(errors="replace") for name in files]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(WORDS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS,
        special_tokens=MARKS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": MARKS[0], "eos_token": MARKS[3], "chat_template": CHAT}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    print(f"{folder}: {tokenizer.get_vocab_size()} tokens of {sum(map(len, texts))} characters in {len(files)} files")


if __name__ == "__main__":
    main()
