#!/usr/bin/env bash
# What clones of hot experts (docs/moe.md) cost and bring on two GPUs of one host: a layer piece by
# piece, graphs equal to eager, then steps at forced balance, at even loads and at three skews.
#   bash bench/echo.sh [FOLDER for results, default bench/results] [short]
# short: only what they cost where there is nothing to clone, by piece and in steps.
set -u
out=${1:-bench/results}
mkdir -p "$out"
run() { timeout "$1" python3 -m torch.distributed.run --nproc-per-node 2 "$2" --json "$out/$3" "${@:4}"; }
static=model.moe.dispatcher=static
clones() { echo "model.moe.echo.spares=$1,model.moe.echo.algorithm=$2"; }
model="+experiment=smallmoe model=qwen3_30b_a3b model.moe.aux_loss_coeff=0.001 model.num_layers=12
  train.micro_batch=1 train.global_batch=16 parallel.dp=2 parallel.ep=2
  cuda_graph=full_iteration $static"
forced=model.moe.force_balance=true
echo2="model.moe.echo.spares=2 model.moe.echo.algorithm=target_search"
echo4="model.moe.echo.spares=4 model.moe.echo.algorithm=target_search"

if [ "${2:-}" = short ]; then
  run 120 bench/clones.py echo_even.json --even
  # shellcheck disable=SC2086
  run 400 bench/step_profile.py echo_even_steps.jsonl --steps 8 \
    $model $forced / $model $forced $echo2 / \
    $model / $model $echo2 / \
    $model $forced / $model $forced $echo2
  exit
fi

run 200 bench/clones.py echo_pieces.json
run 300 bench/graphs.py echo_graphs.jsonl --steps 120 \
  "ep2-moe/full_iteration,$static,$(clones 2 one_shot_greedy)" \
  "ep2-moe/full_iteration,$static,$(clones 2 target_search),model.moe.static.transport=collective" \
  "ep2-moe/partial,$static,$(clones 1 one_shot_greedy)" \
  "ep2-moe/layer,$static,$(clones 1 approx_bin_packing)" \
  "ep2-moe/full_iteration,$static,$(clones 4 target_search),model.moe.static.capacity=factor,model.moe.static.factor=1.3"
# shellcheck disable=SC2086
run 580 bench/step_profile.py echo_steps.jsonl --steps 8 \
  $model $forced / $model $forced $echo2 / \
  $model / $model $echo2 / \
  $model $forced / $model $forced $echo2 / \
  $model hot=2:2.8 / $model hot=2:2.8 $echo2 / \
  $model hot=4:2.8 / $model hot=4:2.8 $echo4 / \
  $model hot=6:2.8 / $model hot=6:2.8 $echo4
