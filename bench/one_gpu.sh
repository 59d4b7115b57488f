#!/usr/bin/env bash
# Runs of docs/benchmarks.md, docs/cuda-graphs.md, docs/fp8.md and docs/planning.md on one GPU. Of
# two GPUs: bench/two_gpus.sh; the baseline: bench/compare.py.
#   bash bench/one_gpu.sh FOLDER [PART …]     results go to FOLDER; without parts, all in this order
# The part losses reads what bench/corpus.py has made of books, in the folder CORPUS.
set -u
out=${1:-bench/results}
mkdir -p "$out"
steps() { timeout "$1" python3 bench/step_profile.py --json "$out/$2" --steps 8 "${@:3}"; }
losses() { timeout "$1" python3 bench/fp8_losses.py "$out/$2" --together 3 "${@:3}"; }

whole="cuda_graph=full_iteration parallel.dp=1"
small="+experiment=small $whole"
smallmoe="+experiment=smallmoe $whole"
dense="+experiment=small model=llama3_8b model.num_layers=8 train.micro_batch=1 train.global_batch=8 $whole"
ordered=train.deterministic=true
te=train.attention_backend=transformer_engine
away=recompute.offload
captured=cuda_graph.impl=transformer_engine
fp8=precision.fp8.recipe
delayed="$fp8=delayed precision.fp8.include=[linear,head]"
experts="$fp8=delayed precision.fp8.include=[linear,head,experts]"
by_layer="+experiment=small parallel.dp=1 cuda_graph=layer"
by_part="+experiment=smallmoe parallel.dp=1 cuda_graph=partial"

# shellcheck disable=SC2086
run_part() {
  case $1 in
  attention) # torch's kernels and cuDNN's by Transformer Engine: alone, in runs, in whole steps
    timeout 120 python3 bench/attention.py --json "$out/attention.json"
    timeout 300 python3 -m pytest -m gpu -q -n0 tests/gpu/test_attention_backend.py \
      2>&1 | tee "$out/attention_tests.txt"
    steps 300 attention_steps.jsonl \
      $small / $small $te / $small $ordered / $small $ordered $te / \
      $dense / $dense $ordered / $dense $ordered $te / \
      $smallmoe / $smallmoe $ordered / $smallmoe $ordered $te ;;
  fp8)
    steps 300 fp8_own_steps.jsonl $small / $small $delayed / $smallmoe / $smallmoe $delayed / $smallmoe $experts / \
      $small cuda_graph=none / $small $fp8=current cuda_graph=none / $small $fp8=delayed cuda_graph=none ;;
  captured) # 120 steps beside eager ones: by Transformer Engine, and parts in FP8
    timeout 560 python3 bench/graphs.py --json "$out/one_gpu_graphs.jsonl" --steps 120 \
      "moe/partial,$captured" "moe/partial,$captured,train.global_batch=32" \
      "moe/partial,$captured,train.global_batch=64" "dense/layer,$captured" \
      "dense/partial,$fp8=current" "dense/partial,$fp8=delayed" "dense/partial,$fp8=block" \
      "dense/layer,$fp8=current" "dense/layer,$fp8=delayed" "dense/layer,$fp8=block" \
      "dense/partial,$fp8=delayed,$captured" "dense/full_iteration,$fp8=block,recompute.full=true"
    timeout 400 python3 bench/graphs.py --json "$out/one_gpu_graphs.jsonl" --steps 120 \
      "dense/layer,$fp8=current,$captured" "dense/layer,$fp8=block,$captured" \
      "dense/attn,$fp8=delayed,$captured" "moe/partial,$fp8=current,$captured" \
      "moe/partial,$fp8=delayed,$captured"
    steps 240 one_gpu_captured.jsonl $by_layer / $by_layer $captured / $by_layer $delayed / \
      $by_layer $captured $delayed / $by_part / $by_part $captured / $by_part $delayed / \
      $by_part $captured $delayed / $small $delayed
    timeout 560 python3 -m pytest -m gpu -q -n0 tests/gpu/test_fp8_runs.py tests/gpu/test_te_graphs.py \
      2>&1 | tee "$out/captured_tests.txt" ;;
  offload) # activations in host memory, beside recomputation
    timeout 300 python3 -m pytest -m gpu -q -n0 tests/gpu/test_offload_on_gpu.py \
      2>&1 | tee "$out/offload_tests.txt"
    steps 500 offload.jsonl $dense / $dense $away=[attn] / $dense $away=[layers] / \
      $dense recompute=full / $dense recompute=full $away=[layers] / \
      $smallmoe / $smallmoe $away=[attn] / $smallmoe $away=[layers] ;;
  fits) # 8 layers at 32,768 tokens on one H100: whole layers recomputed, or the little that has to be
    long="+experiment=small model=llama3_8b model.num_layers=8 train.seq_len=32768 train.micro_batch=1
      train.global_batch=2 loss.chunk_tokens=8192 cuda_graph=full_iteration"
    steps 300 offload.jsonl $long recompute=full / \
      $long recompute.phases=[mlp_act] $away=[attn] optim.moments=bf16 ;;
  microbatches)
    for moments in fp32 bf16; do
      steps 200 microbatches.jsonl $smallmoe optim.moments=$moments / \
        $smallmoe optim.moments=$moments train.micro_batch=4 / $smallmoe optim.moments=$moments train.micro_batch=8
    done ;;
  recompute) # whole and in part, and attention of other lengths
    timeout 300 python3 bench/step_profile.py --json "$out/recompute.jsonl" --steps 6 --top 12 \
      $dense / $dense recompute=full / $dense recompute=selective / \
      $smallmoe recompute=full / $small recompute=full / \
      $dense train.seq_len=16384 train.global_batch=2 recompute=selective / \
      $dense train.seq_len=1024 train.micro_batch=4 train.global_batch=32 ;;
  layers) # one layer, one kernel at a time
    timeout 300 python3 bench/fp8.py --ways bf16 current delayed block rows --json "$out/fp8_layers.json"
    timeout 60 python3 bench/fp8_rows.py --alternatives --json "$out/fp8_rows.json"
    timeout 200 python3 bench/fp8.py --errors >"$out/fp8_errors.md"
    timeout 120 python3 bench/fp8_errors.py >>"$out/fp8_errors.md" ;;
  losses) # 21 runs of 500 steps, of nearly a minute each where three share the GPU
    : "${CORPUS:?a folder that bench/corpus.py has made of books}"
    words=(data=text "data.path=$CORPUS/texts/*.txt" "data.tokenizer=$CORPUS/tokenizer.json")
    losses 900 fp8_losses_small --experiment small --ways current,delayed,block train.seq_len=2048 "${words[@]}"
    losses 900 fp8_losses_smallmoe --experiment smallmoe \
      train.seq_len=512 train.micro_batch=8 train.global_batch=32 model.num_layers=8 "${words[@]}" ;;
  *) echo "bench/one_gpu.sh: $1: is no part" >&2 && return 2 ;;
  esac
}
parts=("${@:2}")
[ ${#parts[@]} -gt 0 ] || parts=(attention fp8 captured offload fits microbatches recompute layers losses)
for part in "${parts[@]}"; do run_part "$part"; done
