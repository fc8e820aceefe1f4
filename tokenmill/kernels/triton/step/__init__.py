"""What a captured step needs besides the model, so that the host need not wait for the device between steps.

  inputs.py           the first launch: token ids, positions and slots from what the host or the last step provided
  logit_edits.py      logits of rows with penalties or masks, before they are drawn from
  sampling.py         logits -> token ids: argmax, temperature, top-k, top-p, min-p
  thresholds.py       the smallest logit that top-k, top-p and min-p keep
  reports.py          log-probabilities of drawn tokens and of the likeliest
  accepted_drafts.py  after checked drafts: which were accepted, and the inputs of the next step
  ngram_lookup.py     drafts looked up in the sequence's own tokens

Called inside the graph, by runtime/executors/cuda and runtime/speculation.
"""
