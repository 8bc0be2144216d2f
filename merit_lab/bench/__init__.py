"""What the lab costs: python -m merit_lab.bench (make bench) measures it and writes data/bench/ and the README's part.

    looking     probes, the dashboard, the X-ray: what it costs to look                     looking.json
    steps       an optimizer step: time, memory and bytes moved, beside named peers          steps.json
    training    tokens a second of `train` beside a plain loop and beside transformers       training.json
    collectives what a step on sharded weights sends, by count, beside the paper's estimate  collectives.json

Each figure is a ratio, or the time of one thing a reader waits for, taken in one process. What is compared is run in
turn, A B C A B C, so that a machine whose speed drifts slows all alike.
"""
