"""Says which rows of a file are not as they need to be: python -m serve.verdict FILE. Ends with 1 where there
are any; a row that was not measured is none of them."""

import json
import operator
import pathlib
import re
import sys

BOUNDS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}


def is_met(row):
    """Whether a row is as its need says; none where it was not measured or needs nothing."""
    value, need = row["value"], row["need"]
    if value is None or need in ("said", "measured"):
        return None
    if need.startswith("all"):
        return value == int(re.match(r"of (\d+)", row["unit"])[1])
    if bound := re.match(r"(>=|<=|>|<) ([\d.]+)", need):
        return BOUNDS[bound[1]](value, float(bound[2]))
    return str(value) == need or re.fullmatch(r"[\d.]+", need) is not None and value == float(need)


def main():
    rows = json.loads(pathlib.Path(sys.argv[1]).read_text())["rows"]
    verdicts = [is_met(row) for row in rows]
    for row in (row for row, met in zip(rows, verdicts) if met is False):
        print(f"missed: {row['name']}: {row['value']} {row['unit']}; need {row['need']}")
    told = [verdicts.count(True), verdicts.count(False), sum(row["value"] is None for row in rows)]
    print("{} as needed, {} missed, {} not measured".format(*told))
    sys.exit(1 if told[1] else 0)


if __name__ == "__main__":
    main()
