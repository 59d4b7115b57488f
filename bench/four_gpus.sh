#!/usr/bin/env bash
# Runs that need four GPUs of one host: equal to eager ones first, then how fast, beside a baseline. None
# of them has been made yet.
#   [BASELINE=peer.py] bash bench/four_gpus.sh FOLDER [PART …]   results go to FOLDER; without parts, all in this order
# BASELINE: the baseline's script, as bench/compare.py has it; without it that part is left out.
set -u
out=${1:-bench/results}
mkdir -p "$out"
run() { timeout "$1" python3 -m torch.distributed.run --standalone --nproc-per-node 4 "$2" --json "$out/$3" "${@:4}"; }
steps() { run "$1" bench/step_profile.py four_gpus_steps.jsonl --steps 8 "${@:2}"; }
compare() { timeout "$1" python3 bench/compare.py --baseline "$BASELINE" --gpus 4 --mbs 1 --gbs 16 --rounds 1 --json "$out/$2" "${@:3}"; }

static=model.moe.dispatcher=static
forced=model.moe.force_balance=true
updates=cuda_graph.optimizer=true
fp8=precision.fp8.recipe
all="precision.fp8.include=[linear,head]"
every="precision.fp8.include=[linear,head,experts]"
sizes="train.micro_batch=1 train.global_batch=16"
moe="+experiment=smallmoe model=qwen3_30b_a3b model.moe.aux_loss_coeff=0.001 model.num_layers=24 $sizes"
dense="+experiment=small model=llama3_8b model.num_layers=16 $sizes cuda_graph=full_iteration"
ep4="parallel.dp=4 parallel.ep=4"
pp2="parallel.pp=2 parallel.vpp=2 parallel.dp=2 parallel.ep=2"
whole="cuda_graph=full_iteration $static"
counted="parallel.layout='Ett|ttt|ttt|tt|tt|tt|tt|L'" # as the plan proposes: the head counts
pp4="parallel.pp=4 parallel.vpp=2 $counted"
v=schedule=zero_bubble_v

# shellcheck disable=SC2086
run_part() {
  case $1 in
  equal) # to eager steps, bit for bit, on 4-layer models
    e=parallel.dp=4,parallel.ep=4
    p=parallel.pp=2,parallel.dp=2,parallel.ep=2
    run 600 bench/graphs.py four_gpus_graphs.jsonl --steps 120 \
      "moe/partial,$e" "moe/full_iteration,$static,$e" \
      "moe/full_iteration,$static,$p,parallel.vpp=2" "moe/full_iteration,$static,$p,schedule=zero_bubble_h1" \
      "moe/full_iteration,$static,$e,model.moe.static.capacity=factor,model.moe.static.factor=1.1" \
      "moe/full_iteration,$static,$e,$updates,$fp8=current,$every" \
      "moe/full_iteration,$static,$e,model.moe.echo.spares=2,model.moe.echo.algorithm=target_search" \
      "dense/full_iteration,parallel.pp=4" "dense/full_iteration,parallel.pp=4,schedule=zero_bubble_h1" ;;
  pieces) # what carries tokens, and one routed layer
    run 120 bench/dispatch.py four_gpus_dispatch.json
    run 120 bench/routed_layer.py four_gpus_layer.json
    run 120 bench/routed_layer.py four_gpus_layer_even.json --even ;;
  moe)
    steps 500 $moe $ep4 cuda_graph=partial / $moe $ep4 $whole / $moe $ep4 $whole $forced / \
      $moe $ep4 cuda_graph=partial $forced / $moe $pp2 $whole / $moe $pp2 $whole $v / $moe $pp2 $whole $forced ;;
  fp8) # with bf16 in the same call
    steps 400 $moe $ep4 $whole / $moe $ep4 $whole $all $fp8=current / $moe $ep4 $whole $every $fp8=current / \
      $moe $ep4 $whole precision.fp8.include=[linear,experts] $fp8=current ;;
  echo) # ranks with 1.7, 2.4 and 2.8 times the mean
    two="model.moe.echo.spares=2 model.moe.echo.algorithm=target_search"
    four="model.moe.echo.spares=4 model.moe.echo.algorithm=target_search"
    steps 500 $moe $ep4 $whole $forced / $moe $ep4 $whole $two / $moe $ep4 $whole hot=2:2.8 / \
      $moe $ep4 $whole hot=2:2.8 $two / $moe $ep4 $whole hot=4:2.8 $four / $moe $ep4 $whole hot=5:2.8 $four ;;
  dense)
    steps 400 $dense parallel.dp=4 / $dense $pp4 / $dense $pp4 $v / $dense parallel.pp=4 parallel.vpp=2 ;;
  baseline) # at its best settings
    compare 500 four_gpus_compare_moe.json --model moe --layers 24 --parallel ep=4 --graphs full_iteration \
      --baseline-graphs partial --force-balance $static
    compare 300 four_gpus_compare_moe_pp2.json --model moe --layers 24 --parallel pp=2,vpp=2,ep=2 \
      --graphs full_iteration --baseline-graphs partial $static
    compare 300 four_gpus_compare_dense.json --model dense --layers 16 --graphs full_iteration --baseline-graphs none
    compare 300 four_gpus_compare_dense_pp4.json --model dense --layers 16 --parallel pp=4,vpp=2 \
      --graphs full_iteration --baseline-graphs none $counted $v ;;
  *) echo "bench/four_gpus.sh: $1: is no part" >&2 && return 2 ;;
  esac
}
parts=("${@:2}")
[ ${#parts[@]} -gt 0 ] || parts=(equal pieces moe fp8 echo dense ${BASELINE:+baseline})
for part in "${parts[@]}"; do run_part "$part"; done
