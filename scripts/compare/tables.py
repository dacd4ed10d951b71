#!/usr/bin/env python3
"""Prints the results of a comparison as Markdown tables for docs/compare.md.

Usage: scripts/compare/tables.py compare.json    (the file that compare.py wrote)
"""

import json
import os
import sys



def row(figures, load, side="router"):
    """One side's figures of one load."""
    return next((one for one in figures if one["load"] == load and one["side"] == side), None)


def number(value, digits=0):
    """A figure, or a dash where there is none."""
    return "–" if value is None else f"{value:,.{digits}f}"


def per_s(run, load):
    """Calls a second, and of those without a router in the same run."""
    ours, direct = row(run["pace"]["full"], load), row(run["pace"]["full"], load, "direct")
    return f"{number(ours['answered_per_s'])} ({number(direct['answered_per_s'])})"


def events(run):
    """Events of streams a second, and of those without a router."""
    figures = [row(run["pace"]["full"], "stream", side) for side in ("router", "direct")]
    rates = [one["answered_per_s"] * one["events"] / max(one["answered"], 1) for one in figures]
    return f"{number(rates[0])} ({number(rates[1])})"


def cpu(run, load):
    """Processor time of a call."""
    return number(row(run["pace"]["full"], load)["cpu_us_per_call"])


def beside(run, load):
    """Processor time of a call in the nodes."""
    return number(row(run["pace"]["full"], load)["beside_cpu_us_per_call"])


def share(run, load):
    """How busy the router's core was."""
    return number(100 * (row(run["pace"]["full"], load)["core_share"] or 0))


def added(run, load, percentile):
    """How much later the first byte comes than without a router, at the same rate."""
    name = f"first_byte_{percentile}_us"
    ours, direct = row(run["pace"]["calm"], load), row(run["pace"]["calm"], load, "direct")
    return number(None if ours[name] is None or direct[name] is None else ours[name] - direct[name])


def errors(run):
    """Calls that failed, of all."""
    figures = [one for one in run["pace"]["full"] + run["pace"]["calm"] if one["side"] == "router"]
    return f"{sum(one['errors'] for one in figures)} of {sum(one['answered'] + one['errors'] for one in figures)}"


def memory(run, name):
    """Resident memory."""
    return number(run["pace"]["memory_mb"][name])


def nodes(run, of):
    """A figure of Baton's nodes, which exist only with --nodes."""
    found = of(run) if run["router"] == "baton" else "none"
    return "–" if found == "0" else found


def replayed(run, of):
    """A figure of the replay."""
    return of(run["replay"]) if "replay" in run else "–"


ROWS = [
    ("small, requests/s (direct)", lambda run: per_s(run, "small")),
    ("small, router's core busy, %", lambda run: share(run, "small")),
    ("small, CPU µs a request", lambda run: cpu(run, "small")),
    ("… in its nodes", lambda run: nodes(run, lambda one: beside(one, "small"))),
    ("128 KiB new, requests/s (direct)", lambda run: per_s(run, "large, new")),
    ("128 KiB new, CPU µs a request", lambda run: cpu(run, "large, new")),
    ("… in its nodes", lambda run: nodes(run, lambda one: beside(one, "large, new"))),
    ("128 KiB three quarters seen, CPU µs a request", lambda run: cpu(run, "large, three quarters seen")),
    ("128 KiB seen, requests/s (direct)", lambda run: per_s(run, "large, prefix seen")),
    ("128 KiB seen, CPU µs a request", lambda run: cpu(run, "large, prefix seen")),
    ("… in its nodes", lambda run: nodes(run, lambda one: beside(one, "large, prefix seen"))),
    ("streams, events/s (direct)", events),
    ("streams, CPU µs an event", lambda run: number(run["pace"]["cpu_us_per_event"], 2)),
    ("streams, CPU µs a stream", lambda run: cpu(run, "stream")),
    ("… in its nodes", lambda run: nodes(run, lambda one: beside(one, "stream"))),
    ("small at 200/s, added p50 µs", lambda run: added(run, "small", "p50")),
    ("small at 200/s, added p99 µs", lambda run: added(run, "small", "p99")),
    ("128 KiB seen at 15/s, added p50 µs", lambda run: added(run, "large, prefix seen", "p50")),
    ("128 KiB seen at 15/s, added p99 µs", lambda run: added(run, "large, prefix seen", "p99")),
    ("memory MB, idle", lambda run: memory(run, "idle")),
    ("memory MB, after", lambda run: memory(run, "after")),
    ("… of its nodes, idle", lambda run: nodes(run, lambda one: memory(one, "nodes_idle"))),
    ("… of its nodes, after", lambda run: nodes(run, lambda one: memory(one, "nodes_after"))),
    ("calls that failed", errors),
    ("trace: prompt tokens found in caches, %", lambda run: replayed(run, lambda one: number(100 * one["cached_share"], 1))),
    ("trace: requests answered", lambda run: replayed(run, lambda one: f"{one['completed']} of {one['sent']}")),
    ("trace: TTFT p50 / p99 s", lambda run: replayed(run, lambda one: f"{number(one['ttft_s']['p50'], 2)} / {number(one['ttft_s']['p99'], 2)}")),
    ("trace: CPU µs a request", lambda run: replayed(run, lambda one: number(one["cpu_us_per_request"]))),
    ("… in its nodes", lambda run: nodes(run, lambda two: replayed(two, lambda one: number(one["nodes_cpu_us_per_request"])))),
]


def cell(run, of):
    """A cell; a run that failed has none."""
    return "failed" if "pace" not in run else of(run)


PLACES = {"whole": "four whole engines", "pairs": "two pairs"}
BEFORE = {"sglang": "SGLang's", "vllm": "vLLM's"}


def column(run):
    """Heading of a run. A peer has engines of one kind only, Baton of either."""
    return f"Baton, {BEFORE[run['engine']]}" if run["router"] == "baton" else run["router"]


def measured(document):
    """One paragraph: versions, tokenizer, machine."""
    versions, machine = document["versions"], document["machine"]
    peers = sorted({run["router"] for run in document["runs"]} - {"baton"})
    routers = ", ".join([*(f"{name} {versions[name]}" for name in peers), versions["baton"]])
    tokens = {"bytes": "one token a byte"}.get(document["tokenizer"], "a trained tokenizer")
    return (f"{routers}; {tokens}, blocks of {document['block_tokens']}; {machine['cores']} cores of {machine['cpu']}, "
            f"{document.get('took_s')} s. In brackets: an engine without a router, in the same run.")


def table(document, place):
    """One arrangement, with a column for each run."""
    runs = [run for run in document["runs"] if run["place"] == place]
    if not runs:
        return []
    parts = ["", f"| {PLACES[place]} | " + " | ".join(map(column, runs)) + " |", "|---" * (len(runs) + 1) + "|"]
    parts += [f"| {name} | " + " | ".join(cells) + " |" for name, of in ROWS
              if set(cells := [cell(run, of) for run in runs]) - {"–", "none", "failed"}]
    if "slice" in document:
        best = document["slice"]["found_at_best"][place]
        room = {"endless": "with endless room", "one_cache_of_all": "with one cache of all that room", "in_turn": "by engines in turn"}
        parts += ["", "Of the trace's prompt tokens could be found: " + ", ".join(
            f"{100 * share:.1f} % {room[name]}" for name, share in best.items()) + "."]
    return parts + [f"{column(run)} failed: {run['failed']}" for run in runs if "failed" in run]


def text(document):
    """The paragraph, and one table for each arrangement."""
    return "\n".join([measured(document), *(line for place in PLACES for line in table(document, place))])


def main():
    """Prints the tables of a file."""
    if len(sys.argv) != 2 or not os.path.exists(sys.argv[1]):
        sys.exit(__doc__)
    with open(sys.argv[1], encoding="utf-8") as file:
        print(text(json.load(file)))


if __name__ == "__main__":
    main()
