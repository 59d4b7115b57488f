#!/usr/bin/env bash
# Runs of docs/benchmarks.md, docs/fp8.md, docs/cuda-graphs.md and docs/planning.md on two GPUs of
# one host. Clones of hot experts: bench/echo.sh; the baseline: bench/compare.py.
#   bash bench/two_gpus.sh FOLDER [PART …]     results go to FOLDER; without parts, all in this order
# The part losses reads what bench/corpus.py has made of books, in the folder CORPUS.
set -u
out=${1:-bench/results}
mkdir -p "$out"
steps() { timeout "$1" python3 -m torch.distributed.run --standalone --nproc-per-node 2 \
  bench/step_profile.py --json "$out/$2" --steps 8 "${@:3}"; }
graphs() { timeout "$1" python3 -m torch.distributed.run --standalone --nproc-per-node 2 \
  bench/graphs.py --json "$out/$2" --steps 120 "${@:3}"; }

te=cuda_graph.impl=transformer_engine
fp8=precision.fp8.recipe
experts="precision.fp8.include=[linear,experts]"
all="precision.fp8.include=[linear,head]"
every="precision.fp8.include=[linear,head,experts]"
updates=cuda_graph.optimizer=true
whole="train.micro_batch=1 train.global_batch=16 cuda_graph=full_iteration"
moe="+experiment=smallmoe model=qwen3_30b_a3b model.moe.aux_loss_coeff=0.001 model.num_layers=12 $whole"
dense="+experiment=small model=llama3_8b model.num_layers=16 $whole"
static=model.moe.dispatcher=static
ep="parallel.dp=2 parallel.ep=2 $static"
two="parallel.pp=2 parallel.vpp=2"
even="$two parallel.layout='Etttt|tttt|ttttt|tttL'" # as the plan proposes
v="$two parallel.layout='Ettt|tttt|tttt|tL' schedule=zero_bubble_v"

# shellcheck disable=SC2086
run_part() {
  case $1 in
  calibrate) # while the GPUs are idle and cool; for conf/hardware
    kind=$(python3 -c 'import torch; print(torch.cuda.get_device_name().split()[1].lower())')
    timeout 300 python3 -m torch.distributed.run --standalone --nproc-per-node 2 \
      -m app.cli.calibrate "name=${kind}_measured" "out=$out" ;;
  equal) # to eager steps, bit for bit
    graphs 800 two_gpus_graphs.jsonl \
      "pp2-moe/partial,$te" "pp2vpp2-dense/layer,$te" "pp2-moe/partial" \
      "pp2-dense/full_iteration,$fp8=delayed" "dp2-dense/full_iteration,$fp8=current" \
      "pp2-dense/full_iteration,$fp8=block,schedule=zero_bubble_h1" "pp2-dense/layer,$te,$fp8=delayed" \
      "pp2vpp2-moe/partial,$te" "pp2vpp2-dense/layer,$te,$fp8=current" \
      "ep2-moe/full_iteration,$static,$fp8=current" \
      "ep2-moe/full_iteration,$static,$fp8=current,$experts" \
      "ep2-moe/full_iteration,$updates,$static" \
      "ep2-moe/full_iteration,$updates,$static,model.moe.static.capacity=factor,model.moe.static.factor=1.05" \
      "pp2-dense/full_iteration,$updates,schedule=zero_bubble_h1,$fp8=delayed" \
      "pp2-moe/full_iteration,$updates,schedule=zero_bubble_h1,$fp8=current,$experts" ;;
  steps)
    steps 400 two_gpus_steps.jsonl \
      $dense parallel.dp=2 / $dense parallel.dp=2 $all $fp8=current / $dense parallel.dp=2 $all $fp8=delayed / \
      $dense $even / $dense $even schedule=zero_bubble_v / \
      $moe $ep / $moe $ep $all $fp8=delayed / $moe $ep $every $fp8=delayed / $moe $ep $experts $fp8=delayed / \
      $moe $ep model.moe.force_balance=true / $moe $two / $moe $v ;;
  long) # experts beside tensor parallelism, and sequences of 131,072 tokens
    both="model.moe.num_experts=64 model.moe.top_k=6 parallel.tp=2 parallel.ep=2 parallel.etp=1"
    long="model.num_layers=4 train.seq_len=131072 train.global_batch=1 loss.chunk_tokens=8192
      parallel.cp=2 parallel.ep=2 parallel.cp_comm_type=all_to_all"
    steps 300 two_gpus_long.jsonl $moe $both $static / $moe $both cuda_graph=partial / \
      $moe $long $static recompute.phases=[norm,moe] / $moe $long $static recompute.full=true ;;
  one_graph) # experts, zero-bubble pipeline, FP8 and update: what each way of capturing takes
    steps 300 two_gpus_steps.jsonl \
      $moe $v $every $fp8=delayed $updates / $moe $v $every $fp8=delayed / $moe $v $updates / \
      $moe $v $every $fp8=delayed cuda_graph=none / $moe $two $every $fp8=delayed cuda_graph=partial ;;
  microbatches) # of 1, 2 and 4 sequences, with every layout and FP8
    large="$moe optim.moments=bf16"
    both="model.moe.num_experts=64 model.moe.top_k=6 parallel.tp=2 parallel.ep=2 parallel.etp=1 $static"
    for each in 1 2 4; do
      size=train.micro_batch=$each
      steps 300 microbatches.jsonl \
        $large $ep $size / $large $ep $every $fp8=delayed $size / $large ${v/Ettt|tttt/Etttt|ttt} $size / \
        $large $both $size / $dense parallel.dp=2 $size / $dense parallel.dp=2 $all $fp8=delayed $size
    done
    steps 300 microbatches.jsonl $moe $ep train.micro_batch=4 / $large $v train.micro_batch=4 / \
      $large $ep model.num_layers=24 / $large $ep model.num_layers=24 train.micro_batch=2 recompute.phases=[norm,moe] ;;
  levers) # with and without, in one call
    steps 600 two_gpus_levers.jsonl \
      $dense parallel.dp=2 / $dense parallel.dp=2 $updates / $moe $ep / $moe $ep $updates / \
      $moe $v
    NCCL_MAX_P2P_NCHANNELS=1 steps 100 two_gpus_levers.jsonl $dense $even schedule=zero_bubble_v / $dense $even
    steps 100 two_gpus_levers.jsonl $dense $even schedule=zero_bubble_v / $dense $even ;;
  captured) # by Transformer Engine beside our own: times, memory
    steps 300 two_gpus_captured.jsonl \
      $dense $two cuda_graph=layer / $dense $two cuda_graph=layer $te / \
      $moe parallel.dp=2 parallel.ep=2 cuda_graph=partial / $moe parallel.dp=2 parallel.ep=2 cuda_graph=partial $te ;;
  small) # where FP8 may not help
    small="+experiment=small parallel.dp=2 cuda_graph=full_iteration"
    smallmoe="+experiment=smallmoe parallel.dp=2 cuda_graph=full_iteration"
    steps 300 two_gpus_small.jsonl \
      $small / $small $updates / $small $fp8=current / $small $fp8=delayed / $small $all $fp8=current / $small $all $fp8=delayed / \
      $small $all $fp8=block / \
      $smallmoe / $smallmoe $all $fp8=delayed / $smallmoe $every $fp8=delayed / \
      $dense parallel.dp=2 $all $fp8=delayed ;;
  losses) # half as many tokens as the experiments have: 24 and nine runs of 500 steps, each a minute
    : "${CORPUS:?a folder that bench/corpus.py has made of books}"
    words=(train.seq_len=2048 data=text "data.path=$CORPUS/texts/*.txt" "data.tokenizer=$CORPUS/tokenizer.json")
    timeout 900 python3 bench/fp8_losses.py "$out/fp8_losses_small" --experiment small --seeds 6 \
      --ways current,delayed,block --together 3 "${words[@]}"
    timeout 900 python3 bench/fp8_losses.py "$out/fp8_losses_smallmoe" --experiment smallmoe --together 2 "${words[@]}" ;;
  *) echo "bench/two_gpus.sh: $1: is no part" >&2 && return 2 ;;
  esac
}
parts=("${@:2}")
[ ${#parts[@]} -gt 0 ] || parts=(calibrate equal steps long one_graph microbatches levers captured small losses)
for part in "${parts[@]}"; do run_part "$part"; done
