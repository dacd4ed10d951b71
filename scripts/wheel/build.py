# SPDX-License-Identifier: Apache-2.0
"""Builds Baton's wheels into target/wheels, with nothing but the standard library.

    python3 scripts/wheel/build.py serve|mooncake [--debug] [--program FILE] [--into FOLDER]

`serve` is `baton_serve`: the program `baton`, for `pip install`. It needs no Python of its own, so one wheel serves every version.
`mooncake` is `baton_mooncake`, the package `mooncake`. One wheel serves every CPython from 3.9 on: the extension uses the stable
interface only and links no libpython.
"""

import argparse
import base64
import dataclasses
import hashlib
import os
import pathlib
import platform
import re
import stat
import subprocess
import sys
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


@dataclasses.dataclass
class Wheel:
    """What the two wheels differ in."""

    name: str
    summary: str
    readme: str
    python: str  # the first two parts of the tag
    build: list  # of cargo
    library: str  # what that leaves in cargo's folder
    path: str  # where the wheel has it

    @property
    def info(self):
        return f"{self.name}-{version()}.dist-info"


WHEELS = {
    "serve": Wheel(
        name="baton_serve",
        summary="Router and scheduler for disaggregated LLM serving: the program baton",
        readme="README.md",
        python="py3-none",
        build=["--package", "baton", "--bin", "baton"],
        library="baton",
        path="baton_serve-{version}.data/scripts/baton",
    ),
    "mooncake": Wheel(
        name="baton_mooncake",
        summary="Baton's transfer engine and object store under the names that engines import",
        readme="docs/python.md",
        python="cp39-abi3",
        build=["--package", "baton-python", "--lib", "--features", "extension"],
        library="libbaton_python.so",
        path="mooncake/_baton.abi3.so",
    ),
}


def target():
    return pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))


def version():
    """That of the workspace, as Python writes it."""
    return re.search(r'\[workspace\.package\]\nversion = "([^"]+)"', (ROOT / "Cargo.toml").read_text())[1]


def build(wheel, debug):
    """Builds what the wheel carries, and returns where it is."""
    # The stable interface needs no interpreter to build against, so whichever python3 is around does not matter.
    env = dict(os.environ, PYO3_NO_PYTHON="1")
    profile = os.environ.get("BATON_PROFILE", "release")
    command = [os.environ.get("CARGO", "cargo"), "build", "--locked", *wheel.build]
    if debug:
        # With the tests, the whole workspace is there already; chosen alone, the package would have crates with other features.
        at = command.index("--package")
        command[at : at + 2] = ["--workspace"]
    else:
        command += ["--profile", profile]
        if wheel.name == "baton_serve":
            command += os.environ.get("BATON_FEATURES", "").split()
    subprocess.run(command, cwd=ROOT, env=env, check=True)
    return target() / ("debug" if debug else profile) / wheel.library


def platform_tag(data):
    """The oldest system that the program runs on, as pip knows it: by the newest version of the C library that it names."""
    named = [int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)\0", data)]
    return f"manylinux_2_{max(named)}_{platform.machine()}" if named else f"linux_{platform.machine()}"


def metadata(wheel):
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {wheel.name.replace('_', '-')}",
        f"Version: {version()}",
        f"Summary: {wheel.summary}",
        "License: Apache-2.0",
        "Requires-Python: >=3.9",
        "Description-Content-Type: text/markdown",
    ]
    return "\n".join(lines) + "\n\n" + (ROOT / wheel.readme).read_text()


def files(wheel, data, tag):
    """Every file of the wheel, by its path."""
    if wheel.name == "baton_mooncake":
        package = ROOT / "src/python/mooncake"
        yield from ((f"mooncake/{path.name}", path.read_bytes()) for path in sorted(package.glob("*.py")))
    yield wheel.path.format(version=version()), data
    yield f"{wheel.info}/METADATA", metadata(wheel).encode()
    yield f"{wheel.info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: baton\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    yield f"{wheel.info}/LICENSE", (ROOT / "LICENSE").read_bytes()


def record(path, data):
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{path},sha256={digest},{len(data)}\n"


def add(archive, path, data):
    # Always the same date, so that the same files make the same wheel.
    entry = zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0))
    entry.compress_type = zipfile.ZIP_DEFLATED
    runs = path.endswith(".so") or "/scripts/" in path
    # pip makes executable only what is a regular file here, too.
    entry.external_attr = (stat.S_IFREG | (0o755 if runs else 0o644)) << 16
    archive.writestr(entry, data)


def main():
    parser = argparse.ArgumentParser(description="Builds one of Baton's wheels.")
    parser.add_argument("wheel", choices=WHEELS)
    parser.add_argument("--debug", action="store_true", help="an unoptimised build, for tests")
    parser.add_argument("--program", type=pathlib.Path, help="what it carries [default: built here]")
    parser.add_argument("--into", type=pathlib.Path, help="the folder [default: target/wheels]")
    args = parser.parse_args()
    wheel = WHEELS[args.wheel]
    data = (args.program or build(wheel, args.debug)).read_bytes()
    tag = f"{wheel.python}-{platform_tag(data)}"
    folder = args.into or target() / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{wheel.name}-{version()}-{tag}.whl"
    records = ""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files(wheel, data, tag):
            add(archive, name, content)
            records += record(name, content)
        name = f"{wheel.info}/RECORD"
        add(archive, name, (records + f"{name},,\n").encode())
    print(path)


if __name__ == "__main__":
    sys.exit(main())
