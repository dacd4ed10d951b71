# SPDX-License-Identifier: Apache-2.0
"""Builds the wheel of the package `mooncake` into target/wheels, with nothing but the standard library.

    python3 scripts/wheel.py [--debug] [--into FOLDER]

One wheel serves every CPython from 3.9 on: the extension uses the stable interface only and links no libpython.
"""

import argparse
import base64
import hashlib
import os
import pathlib
import platform
import re
import subprocess
import sys
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
NAME = "baton_mooncake"


def build(debug):
    """Builds the extension, and returns where it is."""
    # The stable interface needs no interpreter to build against, so whichever python3 is around does not matter.
    env = dict(os.environ, PYO3_NO_PYTHON="1")
    command = [os.environ.get("CARGO", "cargo"), "build", "--locked", "--lib", "--features", "extension"]
    # With the tests, the whole workspace is there already; chosen alone, the package would have crates with other features.
    command += ["--workspace"] if debug else ["--package", "baton-python", "--release"]
    subprocess.run(command, cwd=ROOT, env=env, check=True)
    return target() / ("debug" if debug else "release") / "libbaton_python.so"


def target():
    return pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))


def version():
    """That of the workspace, as Python writes it."""
    return re.search(r'\[workspace\.package\]\nversion = "([^"]+)"', (ROOT / "Cargo.toml").read_text())[1]


def metadata():
    lines = [
        "Metadata-Version: 2.1",
        "Name: baton-mooncake",
        f"Version: {version()}",
        "Summary: Baton's transfer engine and object store under the names that engines import",
        "License: Apache-2.0",
        "Requires-Python: >=3.9",
    ]
    return "\n".join(lines) + "\n\n" + (ROOT / "docs/python.md").read_text()


def files(library, tag):
    """Every file of the wheel, by its path."""
    package = ROOT / "src/python/mooncake"
    yield from ((f"mooncake/{path.name}", path.read_bytes()) for path in sorted(package.glob("*.py")))
    yield "mooncake/_baton.abi3.so", library.read_bytes()
    info = f"{NAME}-{version()}.dist-info"
    yield f"{info}/METADATA", metadata().encode()
    yield f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: baton\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    yield f"{info}/LICENSE", (ROOT / "LICENSE").read_bytes()


def record(path, data):
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{path},sha256={digest},{len(data)}\n"


def add(wheel, path, data):
    # Always the same date, so that the same files make the same wheel.
    entry = zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0))
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = (0o755 if path.endswith(".so") else 0o644) << 16
    wheel.writestr(entry, data)


def main():
    parser = argparse.ArgumentParser(description="Builds the wheel of the package mooncake.")
    parser.add_argument("--debug", action="store_true", help="an unoptimised build, for tests")
    parser.add_argument("--into", type=pathlib.Path, help="the folder [default: target/wheels]")
    args = parser.parse_args()
    library = build(args.debug)
    tag = f"cp39-abi3-linux_{platform.machine()}"
    folder = args.into or target() / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{NAME}-{version()}-{tag}.whl"
    records = ""
    with zipfile.ZipFile(path, "w") as wheel:
        for name, data in files(library, tag):
            add(wheel, name, data)
            records += record(name, data)
        name = f"{NAME}-{version()}.dist-info/RECORD"
        add(wheel, name, (records + f"{name},,\n").encode())
    print(path)


if __name__ == "__main__":
    sys.exit(main())
