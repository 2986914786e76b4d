#!/bin/sh
# Unpack a Kubernetes node from FOLDER (see node_archive.py) and run kubernetes_on_gpu.py on it, with the other arguments.
set -eu
folder=$1
shift
cd "$(dirname "$0")/../.."
node=${NODE_FOLDER:-/opt/modelserve-node}
began=$(date +%s)
python3 tests/gpu/node_archive.py unpack "$folder" "$node"
echo "unpacked in $(($(date +%s) - began)) s"
unset KUBECONFIG
export MODELSERVE_CACHE="$node" CNI_PATH="$node/cni" PATH="$node/bin:$PATH" PYTHONUNBUFFERED=1
export PYTHONPATH="$node/site:$PWD/operator:$PWD/worker:$PWD/tests/cluster:$PWD/tests/gpu"
exec python3 tests/gpu/kubernetes_on_gpu.py --site "$node/site" "$@"
