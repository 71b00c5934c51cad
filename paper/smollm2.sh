#!/usr/bin/env bash
# SmolLM2-135M: tickets of one parent (workers: one whole, three half; or a single one) beside prune and heal at equal totals.
#
#   bash paper/smollm2.sh MODEL TRAIN VALID TEST OUT [SECTION.KEY=VALUE ...]
#
# MODEL: HuggingFaceTB/SmolLM2-135M, or gguf:FILE. TRAIN, VALID, TEST: tokens that `twistlm prepare` made. Every model's
# perplexity stands in OUT/eval. Called again, it goes on. RATES="1e-3 1.5e-3", SEEDS="1 2 3" and WORKERS="4 1" say what is
# tried, JOBS=4 does so many runs at once.
set -euo pipefail
. "$(dirname "$0")/jobs.sh"
model=$1 train=$2 valid=$3 test=$4 out=$5 keys=("${@:6}")
n=${TOKENS:-9830400} # of the start, of each parent, and of the four healed sizes together
read -ra ratios <<<"attn=2/3,ffn=8/12 attn=2/3,ffn=6/12 attn=1/3,ffn=4/12 attn=1/3,ffn=3/12"
mkdir -p "$out/eval"

evaluate() { # NAME MODEL [--ratio RATIO ...]
  test -e "$out/eval/$1.json" || twistlm eval "$2" data.seq_len=1024 "${@:3}" --n 1 --data "$test" \
    --tokens 65536 --json "$out/eval/$1.json"
}

train() { # RUN [SECTION.KEY=VALUE ...]
  # a round has 10 steps of 32 sequences of 1,024 tokens, however many workers share them
  twistlm train paper/smollm2.toml run.out="$1" data.train="$train" data.valid="$valid" train.rounds=$((n / 327680)) \
    "${@:2}" "${keys[@]}" --auto-resume
}

twist() { # WORKERS RATE SEED
  local one=() name=twist-$1-$2-$3
  if (($1 == 1)); then one=(train.n_workers=1 train.batch=32 blocks.widths=cycle blocks.k_attn=3 blocks.k_ffn=12); fi
  train "$out/$name" model.weights="$out/start" train.lr="$2" run.seed="$3" "${one[@]}"
  evaluate "$name" "$out/$name" "${ratios[@]/#/--ratio=}"
}

heal() { # RATIO RATE SEED
  local name=healed-${1//\//of}-$2-$3
  test -e "$out/$name" || twistlm heal "$out/cut-${1//\//of}" -o "$out/$name" --tokens $((n / 4)) --teacher "$out/start" \
    --data "$train" --valid "$valid" --valid-tokens 8192 data.seq_len=1024 train.batch=16 train.lr="$2" \
    run.seed="$3"
  evaluate "$name" "$out/$name"
}

# ordinary training first: text that is new to the model, so that it can be its own teacher
train "$out/start" model.weights="$model" train.method=dense train.teacher=none train.n_workers=1 train.batch=32 \
  train.lr=2e-4
evaluate start "$out/start"
for ratio in "${ratios[@]}"; do
  test -e "$out/cut-${ratio//\//of}" || twistlm extract "$out/start" -o "$out/cut-${ratio//\//of}" --ratio "$ratio" \
    --pick neurons --data "$train" --tokens 65536 train.scale=none
done
for seed in ${SEEDS:-1}; do
  for rate in ${RATES:-1e-3 1.5e-3}; do
    for workers in ${WORKERS:-4 1}; do later twist "$workers" "$rate" "$seed"; done
    for ratio in "${ratios[@]}"; do later heal "$ratio" "$rate" "$seed"; done
  done
done
finish
