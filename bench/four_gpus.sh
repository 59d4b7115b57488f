#!/usr/bin/env bash
# Runs of docs/benchmarks.md that need four GPUs of one host: equal to eager first, then how fast.
#   bash bench/four_gpus.sh [FOLDER for results, default bench/results]
set -u
out=${1:-bench/results}
run() { timeout "$1" python3 -m torch.distributed.run --nproc-per-node 4 "$2" --json "$out/$3" "${@:4}"; }
static=model.moe.dispatcher=static
ep4=parallel.ep=4,parallel.dp=4
pp2=parallel.pp=2,parallel.ep=2,parallel.dp=2

run 300 bench/dispatch.py four_gpus_dispatch.jsonl
run 600 bench/graphs.py four_gpus_graphs.jsonl --steps 120 \
  "moe/full_iteration,$static,$ep4" "moe/full_iteration,$static,$pp2" \
  "moe/full_iteration,$static,$pp2,parallel.vpp=2" \
  "moe/full_iteration,$static,$pp2,schedule=zero_bubble_h1" \
  "moe/full_iteration,$static,$ep4,model.moe.static.capacity=factor,model.moe.static.factor=1.1"

model="+experiment=smallmoe model=qwen3_30b_a3b model.moe.aux_loss_coeff=0.001 model.num_layers=24
  train.micro_batch=1 train.global_batch=16"
whole="cuda_graph=full_iteration $static"
forced="model.moe.force_balance=true"
# shellcheck disable=SC2086
run 900 bench/step_profile.py four_gpus_steps.jsonl --steps 8 \
  $model parallel.dp=4 parallel.ep=4 cuda_graph=partial / \
  $model parallel.dp=4 parallel.ep=4 $whole / \
  $model parallel.dp=4 parallel.ep=4 $whole $forced / \
  $model parallel.pp=2 parallel.vpp=2 parallel.dp=2 parallel.ep=2 $whole
