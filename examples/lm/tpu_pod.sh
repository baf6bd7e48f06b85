#!/usr/bin/env bash
# Trains on a slice of a TPU pod, with the same commands on every host.
#
#   export PROJECT=... ZONE=us-west4-a BUCKET=... NAME=memcache
#   bash examples/lm/tpu_pod.sh create     # 256 chips of v5e, 64 hosts
#   bash examples/lm/tpu_pod.sh install    # this checkout and its packages
#   bash examples/lm/tpu_pod.sh train configs/lm/titans_grm_760m.py
#   bash examples/lm/tpu_pod.sh delete
#
# The bucket is mounted on every host, at the folder `pod` of the checkout; text,
# tokenizer and run lie there. `train` goes on where an earlier one stopped.
# Not yet run on a pod.
set -euo pipefail

: "${PROJECT:?}" "${ZONE:?}" "${BUCKET:?}" "${NAME:?}"
accelerator=${ACCELERATOR:-v5litepod-256}
runtime=${RUNTIME:-v2-alpha-tpuv5-lite}
tpu() {
  gcloud compute tpus tpu-vm "$@" --project="$PROJECT" --zone="$ZONE"
}
everywhere() {
  tpu ssh "$NAME" --worker=all --command="set -e; $1"
}

case ${1:?create, install, train or delete} in
  create)
    tpu create "$NAME" --accelerator-type="$accelerator" --version="$runtime"
    ;;
  install)
    git archive --prefix=memcache_jax/ --format=tar.gz -o "$NAME.tar.gz" HEAD
    tpu scp "$NAME.tar.gz" "$NAME":source.tar.gz --worker=all
    everywhere "tar xzf source.tar.gz
      python3.11 -m venv venv || {
        sudo apt-get install -y -q python3.11-venv
        python3.11 -m venv venv
      }
      venv/bin/pip install -q -e 'memcache_jax[tpu,train,text]'
      mkdir -p memcache_jax/pod
      mountpoint -q memcache_jax/pod ||
        gcsfuse --implicit-dirs $BUCKET memcache_jax/pod"
    ;;
  train)
    config=${2:?a file of configs/lm}
    shift 2
    everywhere "cd memcache_jax
      ../venv/bin/python -m examples.lm.main --distributed \
        --config=$config --workdir=pod/runs/$(basename "$config" .py) \
        --config.data.path='pod/fineweb/*.parquet' \
        --config.data.tokenizer=pod/tokenizer_32k.json $*"
    ;;
  delete)
    tpu delete "$NAME" --quiet
    ;;
  *)
    echo "unknown: $1" >&2
    exit 2
    ;;
esac
