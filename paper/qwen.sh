#!/usr/bin/env bash
# Qwen2.5-Coder-0.5B: tickets of one parent beside prune and heal at equal totals, SparseGPT, and blocks by score.
#
#   bash paper/qwen.sh MODEL TEXT OUT [SECTION.KEY=VALUE ...]
#
# MODEL: a Hugging Face id or folder, or gguf:FILE. TEXT: a folder with train/code, train/wiki, test/code, test/wiki and
# tasks (for `twistlm eval --tasks`). Every model's perplexities and tasks stand in OUT/eval. Called again, it goes on.
# RATES="1e-4 3e-4" are the learning rates of the healed models. JOBS=3 runs so many at once.
set -euo pipefail
. "$(dirname "$0")/jobs.sh"
model=$1 text=$2 out=$3 keys=("${@:4}")
n=${TOKENS:-60000000} # the parent's; each healed size has a quarter
read -ra to <<<"${TO:-396.5M 348M 283.5M 267M}" # 80, 70, 57 and 53% of the parameters: so many of 19 FFN blocks are
read -ra ks <<<"${KS:-13 10 6 5}"
cut=(blocks.setting=ffn blocks.n_ffn=19 blocks.shared_first=0 blocks.shared_last=0 data.seq_len=1024)
mkdir -p "$out/eval"

evaluate() { # NAME MODEL
  for kind in code wiki; do
    test -e "$out/eval/$1-$kind.json" || twistlm eval "$2" data.seq_len=1024 --n 1 \
      --data "$out/test-$kind" --tokens 200000 --json "$out/eval/$1-$kind.json"
  done
  test -e "$out/eval/$1-tasks.json" || twistlm eval "$2" --tasks "$text/tasks" --json "$out/eval/$1-tasks.json"
}

parent() { # and its tickets
  twistlm shrink "$model" --text "$text/train/code:0.5" --text "$text/train/wiki:0.5" "${to[@]/#/--to=}" --tokens "$n" \
    -o "$out/shrink" blocks.setting=ffn "${keys[@]}"
  evaluate whole "$out/shrink/parent"
  for i in "${!ks[@]}"; do evaluate "twist-${ks[i]}" "$out/shrink/params-${to[i]}"; done
}

heal() { # K RATE: it learns from the same text, with the given model as teacher
  local name=healed-$1-$2
  test -e "$out/$name" || twistlm heal "$out/cut-$1" -o "$out/$name" --tokens $((n / 4)) \
    --data "$out/shrink/text/train" --valid "$out/shrink/text/valid" --valid-tokens 65536 data.seq_len=1024 \
    train.batch=16 train.distil=0.9 'train.betas=[0.9,0.95]' train.weight_decay=0.1 train.clip=1.0 \
    train.lr="$2" "${keys[@]}"
  evaluate "$name" "$out/$name"
}

cut_neurons() { # K: the best neurons of the given model, not trained yet
  test -e "$out/cut-$1" || twistlm extract "$model" -o "$out/cut-$1" --ratio "ffn=$1/19" --pick neurons \
    --data "$out/shrink/text/train" --tokens 65536 train.scale=none "${cut[@]}"
}

prune() { # METHOD K
  test -e "$out/$1-$2" || twistlm lab prune "$model" -o "$out/$1-$2" --method "$1" --ratio "ffn=$2/19" \
    --data "$out/shrink/text/train" "${cut[@]}"
  evaluate "$1-$2" "$out/$1-$2"
}

for kind in code wiki; do
  test -e "$out/test-$kind.json" || twistlm prepare "$text/test/$kind" -o "$out/test-$kind" --tokenizer "$model"
done
later parent
until test -e "$out/shrink/train.toml"; do # its text is the healed models', too
  kill -0 "${jobs[0]}"
  sleep 1
done
later evaluate given "$model"
for k in "${ks[@]}"; do cut_neurons "$k"; done # before two heal it at once
for k in "${ks[@]}"; do
  for rate in ${RATES:-1e-4 3e-4}; do later heal "$k" "$rate"; done
  for method in sparsegpt block:mask-fisher; do later prune "$method" "$k"; done
done
finish
