#!/usr/bin/env bash
# Qwen2.5-Coder-0.5B: tickets of one parent beside prune and heal at equal totals, SparseGPT, and blocks by score.
#
#   bash paper/qwen.sh MODEL TEXT OUT [SECTION.KEY=VALUE ...]
#
# MODEL: a Hugging Face id or folder, or gguf:FILE. TEXT: a folder with train/code, train/wiki, test/code, test/wiki and
# tasks (for `twistlm eval --tasks`). Every model's perplexities and tasks stand in OUT/eval. Called again, it goes on.
# JOBS=8 measures and heals so many models at once.
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

heal() { # K: it learns from the same text at the same rate, with the given model as teacher
  test -e "$out/cut-$1" || twistlm extract "$model" -o "$out/cut-$1" --ratio "ffn=$1/19" --pick neurons \
    --data "$out/shrink/text/train" --tokens 65536 train.scale=none "${cut[@]}"
  test -e "$out/healed-$1" || twistlm heal "$out/cut-$1" -o "$out/healed-$1" --tokens $((n / 4)) \
    --data "$out/shrink/text/train" --valid "$out/shrink/text/valid" --valid-tokens 65536 data.seq_len=1024 \
    train.batch=16 train.distil=0.9 'train.betas=[0.9,0.95]' train.weight_decay=0.1 train.clip=1.0 \
    train.lr=1.5e-4 "${keys[@]}"
  evaluate "healed-$1" "$out/healed-$1"
}

prune() { # METHOD K
  test -e "$out/$1-$2" || twistlm lab prune "$model" -o "$out/$1-$2" --method "$1" --ratio "ffn=$2/19" \
    --data "$out/shrink/text/train" "${cut[@]}"
  evaluate "$1-$2" "$out/$1-$2"
}

for kind in code wiki; do
  test -e "$out/test-$kind.json" || twistlm prepare "$text/test/$kind" -o "$out/test-$kind" --tokenizer "$model"
done
twistlm shrink "$model" --text "$text/train/code" --text "$text/train/wiki" "${to[@]/#/--to=}" --tokens "$n" \
  -o "$out/shrink" blocks.setting=ffn train.lr=1.5e-4 "${keys[@]}"
for k in "${ks[@]}"; do later heal "$k"; done
later evaluate given "$model"
later evaluate whole "$out/shrink/parent"
for i in "${!ks[@]}"; do
  later evaluate "twist-${ks[i]}" "$out/shrink/params-${to[i]}"
  later prune sparsegpt "${ks[i]}"
  later prune block:mask-fisher "${ks[i]}"
done
finish
