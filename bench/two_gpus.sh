#!/usr/bin/env bash
# Runs of docs/benchmarks.md, docs/fp8.md and docs/cuda-graphs.md on two GPUs of one host: equal to
# eager first, then how fast. Clones of hot experts: bench/echo.sh; the peer: bench/compare.py.
#   bash bench/two_gpus.sh [FOLDER for results, default bench/results]
set -u
out=${1:-bench/results}
# First, while the GPUs are idle and cool: what they, their host and their links reach, in less than three minutes. Of two H200s
# it is for conf/hardware/h200.yaml, of two H100s for conf/hardware/h100.yaml, whose numbers nobody has measured
kind=$(python3 -c 'import torch; print(torch.cuda.get_device_name().split()[1].lower())')
timeout 300 python3 -m torch.distributed.run --standalone --nproc-per-node 2 -m app.cli.calibrate "name=${kind}_measured" "out=$out"
run() { timeout "$1" python3 -m torch.distributed.run --nproc-per-node 2 "$2" --json "$out/$3" "${@:4}"; }
te=cuda_graph.impl=transformer_engine
fp8=precision.fp8.recipe
experts="precision.fp8.include=[linear,experts]"

run 450 bench/graphs.py two_gpus_graphs.jsonl --steps 120 \
  "pp2-moe/partial,$te" "pp2vpp2-dense/layer,$te" "pp2-moe/partial" \
  "pp2-dense/full_iteration,$fp8=delayed" "dp2-dense/full_iteration,$fp8=current" \
  "pp2-dense/full_iteration,$fp8=block,schedule=zero_bubble_h1" "pp2-dense/layer,$te,$fp8=delayed" \
  "ep2-moe/full_iteration,model.moe.dispatcher=static,$fp8=current" \
  "ep2-moe/full_iteration,model.moe.dispatcher=static,$fp8=current,$experts" \
  "pp2-moe/full_iteration,schedule=zero_bubble_h1,$fp8=current,$experts"

moe="+experiment=smallmoe model=qwen3_30b_a3b model.moe.aux_loss_coeff=0.001 model.num_layers=12
  train.micro_batch=1 train.global_batch=16 cuda_graph=full_iteration"
dense="+experiment=small model=llama3_8b model.num_layers=16 train.micro_batch=1 train.global_batch=16
  cuda_graph=full_iteration"
ep="parallel.dp=2 parallel.ep=2 model.moe.dispatcher=static"
# what is computed again, whole and in part, and attention of other lengths: planned, and recorded by nobody
# shellcheck disable=SC2086
run 400 bench/step_profile.py two_gpus_recompute.jsonl --steps 8 \
  $dense parallel.dp=2 recompute=full / $dense parallel.dp=2 recompute=selective / \
  $dense parallel.pp=2 parallel.vpp=2 recompute=full / $moe $ep recompute=full / $moe $ep recompute=selective / \
  $dense parallel.dp=2 model.num_layers=8 train.seq_len=16384 train.global_batch=4 recompute=selective / \
  $dense parallel.dp=2 model.num_layers=8 train.seq_len=1024 train.micro_batch=4 train.global_batch=64
all="precision.fp8.include=[linear,head]"
even="parallel.pp=2 parallel.vpp=2 parallel.layout='Etttt|tttt|ttttt|tttL'" # as the plan proposes
every="precision.fp8.include=[linear,head,experts]"
# shellcheck disable=SC2086
run 300 bench/step_profile.py two_gpus_steps.jsonl --steps 8 \
  $dense parallel.dp=2 / $dense parallel.dp=2 $all $fp8=current / $dense parallel.dp=2 $all $fp8=delayed / \
  $dense $even / $dense $even schedule=zero_bubble_v / \
  $moe $ep / $moe $ep $all $fp8=current / $moe $ep $every $fp8=current / $moe $ep $experts $fp8=current / \
  $moe parallel.pp=2 parallel.vpp=2 / \
  $moe parallel.pp=2 parallel.vpp=2 "parallel.layout='Ettt|tttt|tttt|tL'" schedule=zero_bubble_v
# experts beside tensor parallelism, and sequences of 131,072 tokens
both="model.moe.num_experts=64 model.moe.top_k=6 parallel.tp=2 parallel.ep=2 parallel.etp=1"
long="model.num_layers=4 train.seq_len=131072 train.global_batch=1 loss.chunk_tokens=8192 parallel.cp=2 parallel.ep=2
  parallel.cp_comm_type=all_to_all recompute.full=true"
# shellcheck disable=SC2086
run 400 bench/step_profile.py two_gpus_steps.jsonl --steps 8 \
  $moe $both model.moe.dispatcher=static / $moe $both cuda_graph=partial / \
  $moe $long model.moe.dispatcher=static / $moe $long cuda_graph=none
# the update in the graph: equal to eager, then step times with and without it in one call
updates=cuda_graph.optimizer=true
run 400 bench/graphs.py two_gpus_updates.jsonl --steps 120 \
  "dp2-dense/full_iteration,$updates" "pp2-dense/full_iteration,$updates,schedule=zero_bubble_h1" \
  "pp2-dense/full_iteration,$updates,schedule=zero_bubble_h1,$fp8=delayed" \
  "ep2-moe/full_iteration,$updates,model.moe.dispatcher=static" \
  "ep2-moe/full_iteration,$updates,model.moe.dispatcher=static,model.moe.static.capacity=factor,model.moe.static.factor=1.05"
# shellcheck disable=SC2086
run 400 bench/step_profile.py two_gpus_update_steps.jsonl --steps 8 \
  $dense parallel.dp=2 / $dense parallel.dp=2 $updates / \
  $dense parallel.pp=2 parallel.vpp=2 / $dense parallel.pp=2 parallel.vpp=2 $updates / \
  $moe $ep / $moe $ep $updates
small="+experiment=small parallel.dp=2 cuda_graph=full_iteration"
counted="precision.fp8.count_entries=true"
# where eight bits may not help, one layer at a time and a whole step; what counting costs while
# nobody looks
# shellcheck disable=SC2086
run 300 bench/step_profile.py two_gpus_small.jsonl --steps 20 \
  $small / $small $fp8=current / $small $fp8=delayed / $small $all $fp8=current / $small $all $fp8=delayed / \
  $small $all $fp8=block / $small $all $fp8=delayed $counted / $dense parallel.dp=2 $all $fp8=delayed $counted
CUDA_VISIBLE_DEVICES=0 timeout 300 python3 bench/fp8.py --json "$out/fp8_layers.json"
CUDA_VISIBLE_DEVICES=0 timeout 100 python3 bench/fp8_rows.py --alternatives --json "$out/fp8_rows.json"
CUDA_VISIBLE_DEVICES=0 timeout 200 python3 bench/fp8.py --errors >"$out/fp8_errors.md"
CUDA_VISIBLE_DEVICES=0 timeout 120 python3 bench/fp8_errors.py >>"$out/fp8_errors.md"
# gradients of experts of two microbatches in one product: step times with and without it in one call
pairs=optim.pair_expert_grads=true
# shellcheck disable=SC2086
run 500 bench/step_profile.py two_gpus_pair_steps.jsonl --steps 8 \
  $moe $ep / $moe $ep $pairs / $moe $ep model.moe.force_balance=true / $moe $ep model.moe.force_balance=true $pairs / \
  $moe parallel.pp=2 parallel.vpp=2 / $moe parallel.pp=2 parallel.vpp=2 $pairs / \
  $moe parallel.pp=2 parallel.vpp=2 "parallel.layout='Ettt|tttt|tttt|tL'" schedule=zero_bubble_v / \
  $moe parallel.pp=2 parallel.vpp=2 "parallel.layout='Ettt|tttt|tttt|tL'" schedule=zero_bubble_v $pairs
timeout 600 python3 bench/fp8_losses.py "$out/fp8_losses"
timeout 600 python3 bench/fp8_losses.py "$out/fp8_losses_experts" --experiment smallmoe
timeout 200 python3 bench/fp8.py --shapes 32x32768x2048x1536 32x32768x768x2048 128x32768x2048x1536 \
  --json "$out/fp8_experts.json"
