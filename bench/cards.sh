#!/usr/bin/env bash
# What is promised of cards and of their hosts, and what of it is true here, in bench/results/cards.json:
#   bench/cards.sh WORK [PART...]
#
# PART is card (bench/h200.sh, up to ten minutes), formats (what of it is about int4 and MXFP4), host (the
# processors beside the card; beside llama.cpp too, where LLAMA_BENCH names its llama-bench and WORK has
# SHAPE-Q4_0.gguf of bench/gguf_model.py), server (q4 serve on the card), ranks (the trainer on two cards; Q4_TRAIN and
# LD_LIBRARY_PATH as in bench/card_ranks.py) or whole (the result file); all of them where none is named. What a
# part measured lies in WORK, so that a machine that is lent for minutes takes one after the other. Wants target/release/q4, or Q4, and what bench/h200.sh wants.
set -euo pipefail
cd "$(dirname "$0")/.."
work=${1:?need a folder for what was measured}
shift
mkdir -p "$work"
export Q4="${Q4:-$PWD/target/release/q4}"
python=${PYTHON:-python3}
for part in "${@:-all}"; do
    case $part in
        card | formats | host | server | ranks | whole | all) ;;
        *) echo "need card, formats, host, server, ranks or whole; have $part" >&2; exit 2 ;;
    esac
    if [[ $part == card || $part == all ]]; then
        # What failed there is a row; what ran before is not taken for it.
        rm -f "$work/card.json"
        bench/h200.sh "$work/card.json" speed kernels first_token exits agreement conformance || true
    fi
    if [[ $part == formats || $part == all ]]; then
        rm -f "$work/formats.json"
        bench/h200.sh "$work/formats.json" formats || true
    fi
    for one in host server ranks; do
        if [[ $part == "$one" || $part == all ]]; then
            "$python" bench/cards.py "$one" --work "$work" > "$work/$one.new"
            mv "$work/$one.new" "$work/$one.json"
        fi
    done
    if [[ $part == whole || $part == all ]]; then
        "$python" bench/cards.py whole --work "$work" > "$work/cards.json"
        cp "$work/cards.json" bench/results/cards.json
    fi
done
