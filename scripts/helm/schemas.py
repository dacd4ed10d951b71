# SPDX-License-Identifier: Apache-2.0
"""Checks manifests against the schemas of the oldest Kubernetes that the chart takes and of a new one: python3 schemas.py FILE."""

import sys

import kubernetes_validate
import yaml

VERSIONS = ("1.27", "1.37")
# Their schemas belong to operators, not to Kubernetes.
OPERATORS = ("monitoring.coreos.com/", "keda.sh/")

count = 0
for manifest in yaml.safe_load_all(open(sys.argv[1])):
    if not manifest:
        continue
    count += 1
    if manifest["apiVersion"].startswith(OPERATORS):
        continue
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(manifest, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            path = ".".join(str(part) for part in error.path)
            sys.exit(f"{sys.argv[1]}: {manifest['kind']} {manifest['metadata']['name']}: {path}: {error.message}")
if not count:
    sys.exit(f"{sys.argv[1]}: no manifest")
