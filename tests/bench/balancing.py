"""Load per expert with and without quantile balancing: `desk-64` trained twice on real text, everything else equal.

Writes artifacts/studies/balancing.json, which the chapter on routing shows. No clock is read: rerun it and the file is
the same on the same machine.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

LAST, DECIMALS = 0.1, 4


def trained(rung, corpus, balance: bool) -> dict:
    """Load shares (expert over mean, sorted, per layer) and held-out loss of one run, over its last tenth."""
    from ladderbook.science.evals import evaluator
    from ladderbook.train import loop, step

    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / 'run'
        execution = replace(step.DESK, balance=balance)
        before = round(rung.recipe.steps * (1 - LAST))
        held_out = evaluator(rung.recipe.spec, corpus)
        loop.train(rung, corpus, run, 0, held_out, stop_after=before, execution=execution)
        program, step_fn = step.compiled(rung.recipe, execution)
        one = loop.Run(rung, program, step_fn, corpus, run, 0, held_out)
        taken = list(loop.steps(one, loop.start(one), rung.recipe.steps))
        loads, state = [metrics.telemetry.load for _, _, metrics, _ in taken], taken[-1][1]
        whole = np.sum(loads, 0)
        each = np.asarray(loads) / np.mean(loads, axis=-1, keepdims=True)
        found = held_out(state.params, state.bias, loop.FINAL_ROWS)
    return {
        'macro': found['macro'],
        'share': np.sort(whole / whole.mean(-1, keepdims=True), -1)[:, ::-1].round(DECIMALS).tolist(),
        'busiest_per_step': each.max(-1).mean(0).round(DECIMALS).tolist(),
        'idle_experts': (whole == 0).sum(-1).tolist(),
    }


def main(name: str = 'desk-64'):
    """Train both, write the record."""
    from ladderbook.data import tokens
    from ladderbook.files import write_json
    from ladderbook.recipe import rungs
    from ladderbook.settings import bundled, load

    rung = rungs.rung(name)
    corpus = tokens.open_corpus(load().paths.cache / 'corpora' / rung.corpus)
    value = {
        'rung': name,
        'corpus': corpus.digest,
        'steps': rung.recipe.steps,
        'command': 'python tests/bench/balancing.py',
        'balanced': trained(rung, corpus, True),
        'unbalanced': trained(rung, corpus, False),
    }
    write_json(bundled('artifacts', 'studies', 'balancing.json'), value, 'ladderbook.balancing')
    print({k: (value[k]['macro'], value[k]['busiest_per_step']) for k in ('balanced', 'unbalanced')})


if __name__ == '__main__':
    main(*sys.argv[1:])
