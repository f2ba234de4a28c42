#!/usr/bin/env bash
# What is promised of cards and of their hosts, and what of it is true here, in bench/results/cards.json:
#   bench/cards.sh WORK [PART...]
#
# PART is card (bench/h200.sh, up to ten minutes), host (the processors beside the card) or whole (the
# result file); all of them where none is named. What a part measured lies in WORK, so that a machine that is
# lent for minutes takes one after the other. Wants target/release/q4, or Q4, and what bench/h200.sh wants.
set -euo pipefail
cd "$(dirname "$0")/.."
work=${1:?need a folder for what was measured}
shift
mkdir -p "$work"
export Q4="${Q4:-$PWD/target/release/q4}"
python=${PYTHON:-python3}
for part in "${@:-all}"; do
    case $part in
        card | host | whole | all) ;;
        *) echo "need card, host or whole; have $part" >&2; exit 2 ;;
    esac
    if [[ $part == card || $part == all ]]; then
        # What failed there is a row; what ran before is not taken for it.
        rm -f "$work/card.json"
        bench/h200.sh "$work/card.json" || true
    fi
    if [[ $part == host || $part == all ]]; then
        "$python" bench/cards.py host --work "$work" > "$work/host.new"
        mv "$work/host.new" "$work/host.json"
    fi
    if [[ $part == whole || $part == all ]]; then
        "$python" bench/cards.py whole --work "$work" > "$work/cards.json"
        cp "$work/cards.json" bench/results/cards.json
    fi
done
