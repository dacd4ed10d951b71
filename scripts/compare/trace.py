"""A slice of a conversation trace, quickened, and what caches of known sizes could find in it at best."""

import collections
import json

# Tokens that an id of the trace stands for.
ID_TOKENS = 512


def slice_of(path, window_s, quicken, most_output_tokens):
    """The requests of the first `window_s` seconds, `quicken` times as fast, with short answers."""
    rows = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            if row["timestamp"] >= window_s * 1000:
                break
            row["timestamp"] = round(row["timestamp"] / quicken)
            row["output_length"] = min(row["output_length"], most_output_tokens)
            rows.append(row)
    return rows


class Cache:
    """Whole blocks of prefixes, the least recently used given up; ids name everything before them."""

    def __init__(self, blocks):
        self.blocks, self.held = blocks, collections.OrderedDict()

    def take(self, row):
        """Tokens found, of one request."""
        ids = row["hash_ids"][:row["input_length"] // ID_TOKENS]
        hits = 0
        while hits < min(len(ids), (row["input_length"] - 1) // ID_TOKENS) and ids[hits] in self.held:
            hits += 1
        for name in reversed(ids):
            self.held.pop(name, None)
            self.held[name] = True
        while len(self.held) > self.blocks:
            self.held.popitem(last=False)
        return hits * ID_TOKENS


def references(rows, engines, tokens_each):
    """Shares of prompt tokens found: with endless room, with all caches in one, and by engines in turn."""
    asked = sum(row["input_length"] for row in rows)
    each = tokens_each // ID_TOKENS
    share = {}
    for name, caches in {"endless": [Cache(1 << 60)], "one_cache_of_all": [Cache(each * engines)],
                         "in_turn": [Cache(each) for _ in range(engines)]}.items():
        found = sum(caches[at % len(caches)].take(row) for at, row in enumerate(rows))
        share[name] = found / asked
    return share
