#!/usr/bin/env bash
# Runs the tests of every crate. Some of them time real processes and share the cores with all
# others, so a busy machine can fail one that is sound: up to five failures are tried once more,
# alone. Both results are printed. A failure that comes twice, a crash and a broken build fail.
set -euo pipefail
cd "$(dirname "$0")/.."

log=$(mktemp)
trap 'rm -f "$log"' EXIT
cargo=${CARGO:-cargo}

# Examples are not among the targets: they have no tests, and `make check` compiles them.
targets=(--lib --bins --tests)
"$cargo" test --workspace --locked --doc
"$cargo" test --workspace --locked --no-fail-fast "${targets[@]}" 2>&1 | tee "$log" && exit 0

# The names are in the last list of each program that had failures; its result line counts them.
mapfile -t names < <(awk '
	/^failures:$/ { delete list; n = 0 }
	/^    [A-Za-z0-9_:]+$/ { list[n++] = $1 }
	/^test result: FAILED/ { for (i = 0; i < n; i++) print list[i]; n = 0 }' "$log" | sort -u)
failed=$(awk '/^test result: FAILED/ { sum += $6 } END { print sum + 0 }' "$log")
programs=$(grep -c '^test result: FAILED' "$log" || true)
listed=$(sed -n 's/^error: \([0-9]*\) targets\{0,1\} failed:$/\1/p' "$log")

if [ "$failed" -eq 0 ] || [ "$failed" -gt 5 ] || [ "${#names[@]}" -ne "$failed" ] || [ "$programs" != "$listed" ]; then
	exit 1
fi
echo "tests: $failed failed; each is tried once more, alone: ${names[*]}" >&2
"$cargo" test --workspace --locked "${targets[@]}" -- --exact "${names[@]}" --test-threads=1 2>&1 | tee "$log"
passed=$(awk '/^test result: ok/ { sum += $4 } END { print sum + 0 }' "$log")
[ "$passed" -ge "$failed" ] || exit 1
echo "tests: failed beside the others and passed alone: ${names[*]}" >&2
