"""A contract for optimizers: small inputs that broke other people's, each with its right answer.

    pytest tests/contract                                       # this project's optimizers, and torch's AdamW
    pytest tests/contract --optimizer mypackage.MyOptimizer     # your own, alone; the option may stand twice
    pytest tests/contract --optimizer mypackage.mine:SUBJECT    # your own, with what it does otherwise said in words

The option is known where tests/contract is named; a run of all of tests/ puts this project's through.

The cases are in test_rows.py, one function each. A case runs for every subject (subject.py) in float32, bfloat16 and
float64. What comes out is compared with numbers that stand in the case, worked out by hand or by the plain loops of
oracle.py, not with another optimizer.

A class that `--optimizer` names is held to every promise of `subject.PROMISES`. It is called as `MyOptimizer(params,
lr=…)`, with `betas`, `eps`, `weight_decay` and `maximize` where it takes them. Its rule is not known here, so that the
cases ask of it only what holds for any optimizer: a step against the gradient, zeros that stay zeros, a copy that goes
on bit for bit.

Where your optimizer keeps a promise otherwise, do not skip the case: name a `Subject` instead of the class, and say in
`differs` what it does instead. The case then asserts the difference:

    from contract.subject import Subject
    SUBJECT = Subject("mine", MyOptimizer, differs={"once": "warns, and steps the parameter twice"})

`Subject` also takes what lets the cases know its numbers (`rule`, `corrected`, `reference`). A skipped case fails.
A class of torch.optim is taken to differ as subject.TORCH says.
"""
