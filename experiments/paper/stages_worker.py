"""The child process of `experiments.paper.stages`: prints the answer of one case as JSON."""

import json
import sys

from experiments.paper.stages import answer_of

if __name__ == "__main__":
    layers, budget, form, limit_s = sys.argv[1:]
    print(json.dumps(answer_of(int(layers), int(budget), form, float(limit_s))))
